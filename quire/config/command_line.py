"""From the words of a command line, as people and other engines write them, to the words that the parser knows.

Owns underscores, vLLM's short flags and other spellings, its options that are not ours (`config/foreign.py`), JSON by
parts (--hf-overrides.rope_theta 1e6) and --config FILE.yaml. Does not own which flags exist nor their values.
Invariants: what the parser knows is passed on as it stands; a wrong word gives a ConfigError that says what to use.
"""

from __future__ import annotations

import json
import logging
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from quire.config.fields import read_yaml
from quire.config.foreign import (
    FOREIGN,
    LLAMA_HINTS,
    SHORT_FLAGS,
    SHORT_FLAGS_OF_PARTS,
    Foreign,
    OptionShape,
    State,
)
from quire.core.errors import ConfigError, shown

CONFIG_FLAG: Final = "--config"
_LEVEL: Final = re.compile(r"^-O(\d+)$")
"""vLLM's -O3, which is -O 3."""
_logger = logging.getLogger(__name__)


def translate(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The command line in the flags of `known`. Raises ConfigError for what another engine has and this one has not."""
    found: list[str] = []
    parts: dict[str, dict[str, Any]] = {}
    left = list(words)
    while left:
        word = _LEVEL.sub(r"-O=\1", left.pop(0))
        if word == "--":
            found += [word, *left]
            break
        written, has_value, value = word.partition("=")
        flag = spelled(written, known)
        if flag in known or not flag.startswith("-") or _is_number(flag):
            found.append(flag + has_value + value)
        elif flag.startswith("--") and flag.split(".")[0] in known:
            _add_part(parts, flag, value if has_value else _value_of(flag, left))
        else:
            found += _foreign(written, flag, [value] if has_value else None, left)
    for flag, value_of in parts.items():
        found += [flag, json.dumps(value_of)]
    return found


def spelled(flag: str, known: Collection[str]) -> str:
    """`flag` as `known` spells it: with dashes, and the long form of vLLM's short ones."""
    if flag in known:
        return flag
    name, dot, rest = flag.partition(".")
    short = SHORT_FLAGS_OF_PARTS if dot else SHORT_FLAGS
    if name in short:
        flag = dashed(short[name]) + dot + rest
    elif flag.startswith("--"):
        flag = name.replace("_", "-") + dot + rest
    name = flag[2:].replace("-", "_")
    if flag not in known and name in FOREIGN and FOREIGN[name].state is State.RENAMED:
        return dashed(FOREIGN[name].because)
    return flag


def dashed(name: str) -> str:
    """`max_num_seqs` → `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def _foreign(written: str, flag: str, value: list[str] | None, left: list[str]) -> list[str]:
    """Judge a flag that is not known here, `written` by the user, with its values from `left`. What is nobody's
    stays for the parser."""
    whole, dot, _ = flag.partition(".")
    name = whole[2:].replace("-", "_") if flag.startswith("--") else ""
    option, given = FOREIGN.get(name), True
    if option is not None and dot and not option.takes_parts():
        option = None
    elif option is None and name.startswith("no_"):
        option, given = FOREIGN.get(name[3:]), False
    if option is None or (not given and option.shape is not OptionShape.SWITCH):
        if written in LLAMA_HINTS:
            raise ConfigError(f"{written} is known in llama.cpp, not in Quire: {LLAMA_HINTS[written]}")
        return [written if value is None else f"{written}={value[0]}"]
    for each in _values(option, given, value, left):
        objection = option.objection(each)
        if objection:
            also = f". In llama.cpp it is another option: {LLAMA_HINTS[written]}" if written in LLAMA_HINTS else ""
            raise ConfigError(objection.replace(option.name, written, 1) + also)
    if option.state is State.NO_EFFECT:
        _logger.warning("%s has no effect: %s", written, option.because)
    return []


def _values(option: Foreign, given: bool, value: list[str] | None, left: list[str]) -> list[str]:
    """What was given for `option`, taken from the words that follow it."""
    if option.shape is OptionShape.SWITCH:
        return value or ["true" if given else "false"]
    if value is not None:
        return value
    if option.state is State.REFUSED:  # whoever forgot the value is told that the option is none here
        return [left.pop(0)] if left and not left[0].startswith("--") else ["true"]
    taken = [_value_of(dashed(option.name), left)]
    while option.shape is OptionShape.LIST and left and not left[0].startswith("-"):
        taken.append(left.pop(0))
    return taken


def _value_of(flag: str, left: list[str]) -> str:
    if not left or (left[0].startswith("--")):
        raise ConfigError(f"argument {flag}: expected one argument")
    return left.pop(0)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _add_part(parts: dict[str, dict[str, Any]], flag: str, text: str) -> None:
    """`--hf-overrides.rope_scaling.factor 4` → {"--hf-overrides": {"rope_scaling": {"factor": 4}}}."""
    name, *keys = flag.split(".")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    place = parts.setdefault(name, {})
    for key in keys[:-1]:
        inner = place.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{flag}: {key} has a value of its own already: give the object as {name} JSON")
        place = inner
    place[keys[-1]] = value


def with_config_file(words: Sequence[str], known: Collection[str]) -> tuple[list[str], str, dict[str, str]]:
    """The command line with the options of its --config FILE, the model that the file names, and flag → where in the
    file it stands, for those that come from there.

    What stands on the command line wins. Raises ConfigError for a file that is no mapping of options.
    """
    left, kept, files = list(words), [], []
    while left:
        word = left.pop(0)
        flag, has_value, value = word.partition("=")
        if flag == CONFIG_FLAG:
            files.append(value if has_value else _value_of(CONFIG_FLAG, left))
        else:
            kept.append(word)
    if len(files) > 1:
        raise ConfigError("--config is given twice: put the options into one file")
    if not files:
        return kept, "", {}
    options, lines = read_yaml(pathlib.Path(files[0]))
    model = options.pop("model_tag", None) or options.pop("model", "")
    given = {_bare_name(word, known) for word in kept if word.startswith("-")}
    names: dict[str, str] = {}
    places: dict[str, str] = {}
    for name, value in options.items():
        bare = _bare_name(dashed(str(name)), known)
        if bare in names:
            raise ConfigError(f"{files[0]} gives {bare} twice, as {names[bare]} and {name}: leave one out")
        names[bare] = str(name)
        if bare not in given:
            is_known = bare in known or bare[2:].replace("-", "_") in FOREIGN
            empty = [] if is_known else [dashed(str(name))]  # the parser says so, as of one that has a value
            kept += empty if value is None else _words_of(str(name), value, f"{files[0]}: {name}")
            place = f"{files[0]}, line {lines[str(name)]}" if str(name) in lines else files[0]
            places |= dict.fromkeys((bare, dashed(str(name))), place)
    return kept, str(model), places


def _bare_name(word: str, known: Collection[str]) -> str:
    flag = spelled(word.partition("=")[0], known)
    return "--" + flag[5:] if flag.startswith("--no-") else flag


def _words_of(name: str, value: object, where: str) -> list[str]:
    """One option of a file as words."""
    flag = dashed(name)
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag[2:]]
    if isinstance(value, Mapping):
        return [flag, _as_json(value, where)]
    if isinstance(value, list):
        return [flag, *(_as_json(each, where) if isinstance(each, Mapping) else str(each) for each in value)]
    if isinstance(value, (str, int, float)):
        return [f"{flag}={value}"]
    raise ConfigError(f"{where} = {shown(value)} must be a text, a number, true or false, a list, or a mapping")


def _as_json(value: Mapping[str, Any], where: str) -> str:
    """ConfigError for what YAML has and JSON has not: dates, bytes, sets, and mappings that hold themselves."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} = {shown(value)} is not of JSON: {error}; put dates into quotes") from None
