"""The bundled demo model: its data, its training and its measurements. Nothing here is imported by `quire`."""
