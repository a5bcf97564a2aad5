"""Code that travels with a checkpoint: saved folders of ours carry none."""

from __future__ import annotations


def refuse_own_code(cls: type) -> None:
    """Raise ValueError if `cls` is of this package, whose files cannot be copied beside a checkpoint one by one.

    transformers would copy the file of the class and what that imports from beside it, without the folders of the
    package, and write an `auto_map` that leads to them: a folder that fails to load wherever remote code is trusted.
    """
    if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
        raise ValueError(
            f"{cls.__name__}.register_for_auto_class: a saved folder needs no code of its own: transformers has "
            "model_type 'zaya', and where zaya_hf is imported its classes are used"
        )


__all__ = ["refuse_own_code"]
