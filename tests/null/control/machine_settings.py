"""How long and how the state machine looks."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def machine_settings(n_examples: int, *, deep: bool) -> settings:
    """Deterministic as a rule; `deep` runs look elsewhere each time, and shrink what they find."""
    return settings(
        max_examples=n_examples,
        stateful_step_count=30,
        database=None,
        derandomize=not deep,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if deep else [Phase.generate],
    )
