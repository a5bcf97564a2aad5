"""What `generate` cannot do for ZAYA, said in one line before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

NO_PAGES = (
    "continuous batching keeps keys and values in pages and has no place for ZAYA's convolution states; give generate "
    "several prompts at once (padded), or use `zaya generate --batch-size`."
)

#: settings of decoding methods that transformers no longer holds itself, what they choose, and when they do
MOVED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "penalty_alpha": ("contrastive search", lambda value: value > 0),
    "dola_layers": ("DoLa", lambda value: True),
    "num_beam_groups": ("group beam search", lambda value: value > 1),
    "force_words_ids": ("constrained beam search", lambda value: True),
    "constraints": ("constrained beam search", lambda value: True),
}


def check_settings(setting: Callable[[str], Any], device_type: str, custom: bool) -> None:
    """Refuse generation settings that the library would stumble over.

    Args:
        setting: gives a generation parameter by its name, None for one that is not set.
        device_type: of the model.
        custom: whether the caller brings the code of the decoding method (`custom_generate`).

    Raises:
        ValueError: in one line that says what to do.
    """
    implementation = setting("cache_implementation")
    if implementation == "quantized":
        raise ValueError(
            "cache_implementation='quantized' quantises keys and values alone; ZAYA's layers hold convolution states "
            "too. Leave it out, or use 'offloaded' or 'static'."
        )
    if implementation == "paged":
        raise ValueError(f"cache_implementation='paged': {NO_PAGES}")
    if device_type == "cpu" and str(implementation).startswith("offloaded"):
        raise ValueError(
            f"cache_implementation={implementation!r} moves keys and values from an accelerator to the CPU, but the "
            "model is on the CPU; leave it out."
        )
    for name, (method, chosen) in MOVED.items():
        value = setting(name)
        if value is not None and chosen(value) and not custom:
            raise ValueError(
                f"{name}={value!r} asks for {method}, which transformers has moved out into code on the Hub; leave it "
                "out, or pass custom_generate and trust_remote_code (not tested with ZAYA)."
            )


class WithoutContinuousBatching:
    """Refuses transformers' continuous batching; `transformers serve` then answers one request at a time."""

    @property
    def init_continuous_batching(self) -> NoReturn:
        # The library asks `hasattr`. torch's modules replace this text by their own.
        raise AttributeError(NO_PAGES)

    def continuous_batching_context_manager(self, *args: Any, **kwargs: Any) -> NoReturn:
        """
        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_PAGES)

    def generate_batch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """
        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(NO_PAGES)
