"""The ZAYA1 model, top to bottom as the papers describe it.

CCA attention (arXiv 2510.04476), MLP router with Exponential Depth Averaging, top-1 experts and residual scaling
(arXiv 2605.05365). Tensor names and shapes are those of the combined layout that transformers' `zaya` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from . import attention, convolution_states, merged_norms, ops, prepared_masks, visibility
from .arguments import check_embeds, check_ids, check_names, one_cu_seq_lens, slots_per_layer, without_boundary_targets
from .basic_layers import ZayaCCAConv, ZayaLinear, ZayaResidualScaling, ZayaRMSNorm
from .cache import adopt, check_call, one_cache
from .compiled_decoding import ZayaCompilingMixin
from .configuration_zaya import ZayaConfig
from .experts_dispatch import OURS, TRITON, register_kernels, run_experts
from .fusing import FusedLinears, ZayaFusingMixin, is_only_its_weights
from .generation import ZayaGenerationMixin
from .loading import ZayaLoadingMixin
from .losses import causal_lm_loss, logits_and_loss, skips_logits
from .ops_report import ZayaOpsMixin
from .outputs import ZayaCausalLMOutput, ZayaModelOutput
from .rotary import RotaryTables
from .tied_embedding import can_share, look_up
from .visibility import Visibility


class ZayaCCAProjection(nn.Module):
    """The four down-projections of CCA and the weights of its two convolutions."""

    fused_projections: FusedLinears | None = None  # see `fuse_for_inference`

    def __init__(self, config: ZayaConfig):
        super().__init__()
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        channels = query_width + key_width
        bias = config.attention_bias
        self.q_proj = ZayaLinear(config.hidden_size, query_width, bias=bias)
        self.k_proj = ZayaLinear(config.hidden_size, key_width, bias=bias)
        self.v_proj_current = ZayaLinear(config.hidden_size, key_width // 2, bias=bias)
        self.v_proj_delayed = ZayaLinear(config.hidden_size, key_width // 2, bias=bias)
        self.conv_qk_depthwise = ZayaCCAConv(channels, channels, config.cca_time0, groups=channels)
        self.conv_qk_grouped = ZayaCCAConv(channels, channels, config.cca_time1, groups=channels // config.head_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[B, S, hidden_size]`` to raw queries and keys, the current value half, the delayed value half."""
        layers, fused = self.layers_to_fuse(), self.fused_projections
        if fused is not None and fused.holds_for(layers):
            raw, value_current, value_delayed = fused(x, (2, 1, 1))
            return raw, value_current, value_delayed
        query, key, value_current, value_delayed = (layer(x) for layer in layers)
        return torch.cat([query, key], dim=-1), value_current, value_delayed

    def layers_to_fuse(self) -> list[nn.Linear]:
        return [self.q_proj, self.k_proj, self.v_proj_current, self.v_proj_delayed]

    def value_of_nothing(self, x: Tensor) -> Tensor | None:
        """``[width]``: the delayed value before the first token, which is the projection's bias; None: zeros."""
        layer = self.v_proj_delayed
        if type(layer) is ZayaLinear:
            nothing = layer.bias is None
        else:  # an adapter may have a bias of its own
            nothing = not any(name.endswith("bias") for name, _ in layer.named_parameters())
        if nothing:
            return None
        return layer(x.new_zeros(1, 1, x.shape[-1]))[0, 0]

    def convolutions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Weight and bias of the depthwise and of the grouped convolution. They are called with `x` since wrappers ask
        for an argument.

        Raises:
            ValueError: where an adapter is around one: it would change what the layer returns, which is its weights.
        """
        for layer in (self.conv_qk_depthwise, self.conv_qk_grouped):
            if not isinstance(layer, ZayaCCAConv) and hasattr(layer, "base_layer"):
                raise ValueError(
                    f"an adapter (a {type(layer).__name__}) is around a convolution of CCA, which takes none: leave "
                    "conv_qk_depthwise and conv_qk_grouped out (modules_to_save may name them)."
                )
        return *self.conv_qk_depthwise(x), *self.conv_qk_grouped(x)


class ZayaQKNorm(nn.Module):
    """Holds the key temperature, one per key/value head. A fresh model starts at 1: at 0 every key would be zero."""

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.temp = nn.Parameter(torch.ones(config.num_key_value_heads))

    def forward(self, x: Tensor) -> Tensor:
        """``[num_key_value_heads]``; called with an argument, which is not read, since wrappers ask for one."""
        return self.temp


class ZayaAttention(nn.Module):
    """Attention on the compressed, convolved, normalised and rotated heads."""

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        self.look_back = config.cca_time0 + config.cca_time1 - 2
        assert config.layer_types is not None
        self.layer_type = config.layer_types[layer_idx]
        self.sliding_window = config.sliding_window if self.layer_type == "hybrid_sliding" else None
        self.qkv_proj = ZayaCCAProjection(config)
        self.qk_norm = ZayaQKNorm(config)
        self.o_proj = ZayaLinear(
            config.num_attention_heads * config.head_dim, config.hidden_size, bias=config.attention_bias
        )

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        visible: Visibility,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        projection = self.qkv_proj
        depthwise_weight, depthwise_bias, grouped_weight, grouped_bias = projection.convolutions(x)
        query, key, value = convolution_states.mix(
            cache,
            self.layer_idx,
            visible,
            *projection(x),
            look_back=self.look_back,
            depthwise_weight=depthwise_weight,
            depthwise_bias=depthwise_bias,
            grouped_weight=grouped_weight,
            grouped_bias=grouped_bias,
            temperature=self.qk_norm(x),
            cos=position_embeddings[0],
            sin=position_embeddings[1],
            head_dim=self.head_dim,
            clamp_temperature=self.config.clamp_temp,
            value_of_nothing=projection.value_of_nothing(x),
        )
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, visible)
        output, weights = attention.attend(self, query, key, value, visible, **kwargs)
        return self.o_proj(output.flatten(2)), weights


class ZayaRouterMLP(nn.Module):
    """RMSNorm and three linear layers with GELU between them."""

    def __init__(self, config: ZayaConfig):
        super().__init__()
        width = config.router_hidden_size
        eps = config.rms_norm_eps if config.router_norm_eps is None else config.router_norm_eps
        self.norm = ZayaRMSNorm(width, eps)
        self.fc1 = ZayaLinear(width, width)
        self.fc2 = ZayaLinear(width, width)
        self.out_proj = ZayaLinear(width, config.num_experts + 1, bias=False)
        self.act_fn = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.act_fn(self.fc2(self.act_fn(self.fc1(self.norm(x))))))


class ZayaRouter(nn.Module):
    """Chooses one slot per token: an expert, or the last slot, which skips them."""

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.down_proj = ZayaLinear(config.hidden_size, config.router_hidden_size)
        if layer_idx > 0:
            self.router_states_scale = nn.Parameter(torch.ones(config.router_hidden_size))
        self.router_mlp = ZayaRouterMLP(config)
        biases = ops.initial_balancing_biases(config.num_experts)
        self.balancing_biases = nn.Buffer(biases.to(self.down_proj.weight.device))  # on meta where those are

    def forward(
        self, x: Tensor, state: Tensor | None = None, replayed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """
        Args:
            x: ``[B, S, hidden_size]``.
            state: ``[B, S, router_hidden_size]`` of the layer before, after its own averaging and before its norm.
            replayed: ``[B, S]`` int64, slots to take; -1: choose.

        Returns:
            logits ``[B S, E + 1]``, slots ``[B S]``, weights ``[B S]``, and the state for the next layer.
        """
        tokens = x.flatten(0, 1), None if state is None else state.flatten(0, 1)
        biases, replayed = self.balancing_biases, None if replayed is None else replayed.flatten()
        if ops.selection.wants_triton("router", x.device):
            plain = self.plain_weights()
            if plain is not None and ops.route_takes(*tokens, plain, biases, replayed):
                logits, slots, weights, router_state, _ = ops.route(*tokens, plain, biases, replayed)
                return logits, slots, weights, router_state.unflatten(0, x.shape[:-1])
        router_state = self.down_proj(x)
        if state is not None:
            router_state = router_state + self.router_states_scale * state
        logits = self.router_mlp(router_state).flatten(0, 1)
        slots, weights = ops.select_slots(logits, biases, replayed)
        return logits, slots, weights, router_state

    def plain_weights(self) -> ops.RouterWeights | None:
        """What kernels read instead of calling the layers. None, with a message, where a call of one of them does more:
        wrapped, hooked, quantised or packed layers."""
        mlp, scale = self.router_mlp, getattr(self, "router_states_scale", None)
        if type(mlp) is ZayaRouterMLP and type(mlp.norm) is ZayaRMSNorm and type(mlp.act_fn) is nn.GELU:
            linears = self.down_proj, mlp.fc1, mlp.fc2, mlp.out_proj
            plain = all(type(layer) is ZayaLinear and layer.packed_weight is None for layer in linears)
            plain = plain and mlp.act_fn.approximate == "none"
            if plain and all(is_only_its_weights(module) for module in (*linears, mlp, mlp.norm, mlp.act_fn)):
                down, fc1, fc2 = ((layer.weight, layer.bias) for layer in linears[:3])
                norm = mlp.norm
                return ops.RouterWeights(*down, scale, norm.weight, *fc1, *fc2, mlp.out_proj.weight, norm.eps)
        ops.selection.say_once("router", "a layer of it is wrapped, hooked, quantised or packed")
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ZayaRouter:
        """Move the balancing biases as asked, but keep their dtype: in bf16 close biases merge and updates vanish."""
        biases = self.balancing_biases
        super()._apply(fn, recurse)
        if self.balancing_biases.dtype != biases.dtype:
            self._buffers["balancing_biases"] = biases.to(self.balancing_biases.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Biases of a narrower file become fp32, also where `load_state_dict(assign=True)` takes its tensors over."""
        super()._load_from_state_dict(*args, **kwargs)
        self._buffers["balancing_biases"] = self.balancing_biases.to(torch.float32)


@use_experts_implementation
class ZayaExpertWeights(nn.Module):
    """Two 3-D parameters, and what the decorator adds for transformers' implementations to read."""

    packed_experts: ops.PackedExperts | None = None  # see `fuse_for_inference`

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(config.num_experts, 2 * config.moe_intermediate_size, config.hidden_size)
        )
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, config.moe_intermediate_size))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[N, hidden_size]``; slots ``[N, 1]``, where num_experts means none; weights ``[N, 1]``."""
        slots, weights = top_k_index[:, 0], top_k_weights[:, 0]
        return ops.experts(
            hidden_states, slots, weights, self.gate_up_proj, self.down_proj, self.act_fn, self.packed_experts
        )

    eager = forward


class ZayaExperts(ZayaExpertWeights):
    """Top-1 SwiGLU experts, run by the implementation that the config names."""

    def __init__(self, config: ZayaConfig):
        super().__init__(config)
        # The skip slot's index is num_experts. The library's implementations leave it out when told that it can occur.
        self._is_expert_parallel = True

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return run_experts(self, hidden_states, top_k_index, top_k_weights)


class ZayaSparseMoeBlock(nn.Module):
    """Router and experts. Tokens in the skip slot reach no expert: they get nothing, or themselves times the weight."""

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.gate = ZayaRouter(config, layer_idx)
        self.experts = ZayaExperts(config)

    def forward(
        self, x: Tensor, router_state: Tensor | None, replayed: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Output ``[B, S, hidden_size]``, router state, router logits ``[B S, E + 1]``, slots ``[B, S]``."""
        logits, slots, weights, router_state = self.gate(x, router_state, replayed)
        flat = x.flatten(0, 1)
        weights = weights.to(flat.dtype)
        output = self.experts(flat, slots[:, None], weights[:, None])
        if self.config.skip_expert == "identity":
            skipped = (slots == self.config.num_experts)[:, None]
            output = torch.where(skipped, flat * weights[:, None], output)
        return output.view_as(x), router_state, logits, slots.view(x.shape[:-1])


class ZayaDecoderLayer(GradientCheckpointingLayer):
    """Attention and experts, each between a norm and a scaled merge into the stream."""

    def __init__(self, config: ZayaConfig, layer_idx: int):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.input_layernorm = ZayaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = ZayaAttention(config, layer_idx)
        self.post_attention_residual_scale = ZayaResidualScaling(config.hidden_size)
        self.post_attention_layernorm = ZayaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = ZayaSparseMoeBlock(config, layer_idx)
        self.post_mlp_residual_scale = ZayaResidualScaling(config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        router_state: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        visible: Visibility,
        cache: Cache | None = None,
        replayed: Tensor | None = None,
        normed: Tensor | None = None,
        lent_norm: ZayaRMSNorm | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Stream ``[B, S, hidden_size]``, router state, router logits and slots. See `merged_norms` for `normed`, what
        `input_layernorm` would give, and `lent_norm`, whose result is then returned too."""
        x = self.input_layernorm(hidden_states) if normed is None else normed
        output, _ = self.self_attn(x, position_embeddings, visible, cache, **kwargs)
        merge, norm = self.post_attention_residual_scale, self.post_attention_layernorm
        hidden_states, x = self._into_stream(merge, norm, output, hidden_states)
        output, router_state, logits, slots = self.mlp(x, router_state, replayed)
        hidden_states, x = self._into_stream(self.post_mlp_residual_scale, lent_norm, output, hidden_states)
        results = hidden_states, router_state, logits, slots
        return results if lent_norm is None else (*results, x)

    def _into_stream(self, merge: nn.Module, norm: nn.Module | None, output: Tensor, stream: Tensor) -> Any:
        """The stream after a sublayer, and that normed."""
        return merged_norms.merge_and_norm(merge, norm, output, stream, None if self.residual_in_fp32 else output.dtype)


class ZayaPreTrainedModel(  # type: ignore[misc]
    ZayaLoadingMixin, ZayaFusingMixin, ZayaCompilingMixin, ZayaOpsMixin, PreTrainedModel
):
    """What every ZAYA model class shares: initialisation, loading, and what transformers asks about it."""

    config_class = ZayaConfig
    config: ZayaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ZayaDecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _is_stateful = False
    _can_record_outputs = {
        "hidden_states": OutputRecorder(ZayaDecoderLayer, index=0),
        "attentions": OutputRecorder(ZayaAttention, index=1),
    }

    # transformers guesses both from the source text of the module; say it instead.
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Adds ours to the names that transformers knows, and makes it the default."""
        if requested_experts == TRITON:
            register_kernels()
        return (
            OURS if requested_experts in (None, OURS) else super().get_correct_experts_implementation(requested_experts)
        )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Values of a fresh model. `init` leaves every tensor alone that was loaded."""
        super()._init_weights(module)
        if isinstance(module, ZayaRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, ZayaResidualScaling):
            init.ones_(module.hidden_states_scale)
            init.ones_(module.residual_scale)
            init.zeros_(module.hidden_states_bias)
            init.zeros_(module.residual_bias)
        elif isinstance(module, ZayaModel):
            init.ones_(module.input_hidden_states_scale)
            init.zeros_(module.input_hidden_states_bias)
        elif isinstance(module, ZayaQKNorm):
            init.ones_(module.temp)
        elif isinstance(module, ZayaRouter):
            if hasattr(module, "router_states_scale"):
                init.ones_(module.router_states_scale)
            biases = module.balancing_biases
            init.copy_(biases, ops.initial_balancing_biases(biases.shape[0] - 1).to(biases.device))
        elif isinstance(module, ZayaExpertWeights):
            init.normal_(module.gate_up_proj, mean=0.0, std=self.config.initializer_range)
            init.normal_(module.down_proj, mean=0.0, std=self.config.initializer_range)


class ZayaModel(ZayaPreTrainedModel):
    """Embedding, layers and final norm.

    Args:
        config: a `ZayaConfig`, or transformers' own, which is converted.
    """

    def __init__(self, config: ZayaConfig):
        config = ZayaConfig.from_native(config)
        config.validate()  # a field may have been changed since the config was made
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.input_hidden_states_scale = nn.Parameter(torch.ones(config.hidden_size))
        self.input_hidden_states_bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.layers = nn.ModuleList(ZayaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = ZayaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTables(config)
        self.layer_types = list(config.layer_types or ())
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        seq_idx: Tensor | None = None,
        routed_experts: Tensor | Sequence[Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> ZayaModelOutput:
        """Hidden states of every token, as if its document stood alone, unpadded and uncached.

        Args:
            input_ids: ``[B, S]`` int; or `inputs_embeds` ``[B, S, hidden_size]`` instead.
            attention_mask: ``[B, S]`` (with a cache also ``[B, cached + S]``), 0 for padding on either side; or a 4-D
                mask, bool or additive, ``[B or 1, heads or 1, S, cached + S]``; or what `create_masks_for_generate`
                made.
            position_ids: ``[B or 1, S]``. Where a position is not its predecessor's + 1, another document starts:
                neither attention nor the convolutions nor the delayed value look across.
            cache: a `DynamicCache`, also under its older name `past_key_values`.
            output_router_logits: fill the router fields of the output (default: the config's).
            cu_seq_lens_q, cu_seq_lens_k: ``[documents + 1]`` cumulative lengths of one packed row; documents may be
                empty.
            seq_idx: ``[B or 1, S]`` document numbers, another form of the same.
            routed_experts: ``[B, S, layers]`` int, the slots that were chosen for these tokens elsewhere, say at
                rollout; or `router_slots` of an output. They are taken as they are (-1: the router chooses) and
                weighed by their probability now, through which the router learns.

        Returns:
            a `ZayaModelOutput`.

        Raises:
            ValueError: for contradicting arguments, shapes that fit nothing above, ids outside the vocabulary.
            TypeError: for a cache that cannot hold ZAYA's states, or an argument that says under another name what is
                padding or a document.
        """
        cache = one_cache(cache, past_key_values)
        check_names(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds.")
        if inputs_embeds is None:
            check_ids(input_ids, self.config.vocab_size)  # follows resize_token_embeddings
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        check_embeds(inputs_embeds, self.config.hidden_size)
        replayed = slots_per_layer(routed_experts, inputs_embeds, len(self.layers), self.config.num_experts)
        if cache is not None and self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            raise ValueError("gradient checkpointing runs layers twice and cannot fill a cache: leave the cache out.")
        history = None if cache is None else adopt(cache, self.config)
        if cache is not None:
            check_call(cache, inputs_embeds)
        shape: dict[str, Any] = {"batch_size": inputs_embeds.shape[0], "sequence_length": inputs_embeds.shape[1]}
        if isinstance(attention_mask, dict):
            if cu_seq_lens_q is not None or cu_seq_lens_k is not None or seq_idx is not None:
                raise ValueError("attention_mask is a dict made ahead: it knows its documents, leave other names out.")
            visible = prepared_masks.from_dict(self.config, attention_mask, **shape, history=history, cache=cache)
        else:
            visible = visibility.describe(
                self.config,
                **shape,
                device=inputs_embeds.device,
                dtype=inputs_embeds.dtype,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cu_seq_lens=one_cu_seq_lens(cu_seq_lens_q, cu_seq_lens_k),
                seq_idx=seq_idx,
                history=history,
                cache=cache,
            )
        record = self.config.output_router_logits if output_router_logits is None else output_router_logits
        if self.compiled_decoding is not None:
            asked = {"record": record, "replay": routed_experts is not None, **kwargs}
            last_hidden_state = self.compiled_decoding.step(inputs_embeds, visible, history, cache, asked)
            if last_hidden_state is not None:
                return ZayaModelOutput(last_hidden_state=last_hidden_state, cache=cache if use_cache else None)
        tables = self.rotary(visible.position_ids, inputs_embeds.dtype)

        (hidden_states, normed, lent), router_state = self.into_stream(inputs_embeds), None
        router_logits, router_slots = [], []
        if history is not None:  # only here: a call that fails above leaves the cache as it was
            history.extend(visible)
        for layer, layer_type, told, norm in zip(self.layers, self.layer_types, replayed, lent, strict=True):
            given = hidden_states, router_state, tables[layer_type], visible
            hidden_states, router_state, logits, slots, normed = merged_norms.call(
                layer, normed, norm, *given, cache=cache, replayed=told, **kwargs
            )
            if record:
                router_logits.append(logits)
                router_slots.append(slots)
        output = ZayaModelOutput(
            last_hidden_state=self.norm(hidden_states) if normed is None else normed,
            cache=cache if use_cache else None,
            segments=visible.segment,
        )
        if record:
            output.record(router_logits, router_slots, visible.real)
        return output

    def into_stream(self, inputs_embeds: Tensor) -> tuple[Tensor, Tensor | None, list[ZayaRMSNorm | None]]:
        """Embeddings ``[B, S, hidden_size]``, scaled, as the residual stream; that normed, if the first layer lends its
        norm; the norm that each layer is lent."""
        scale, bias = self.input_hidden_states_scale, self.input_hidden_states_bias
        stream_dtype = None if self.config.residual_in_fp32 else inputs_embeds.dtype
        norm, *lent = merged_norms.lent(self, ZayaDecoderLayer, inputs_embeds)
        return *merged_norms.embed_and_norm(inputs_embeds, scale, bias, norm, stream_dtype), lent


class ZayaLMHead(ZayaLinear):
    """The head's product; in fp32 or wider with `fp32_logits`."""

    def __init__(self, config: ZayaConfig):
        super().__init__(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.config = config

    @property
    def reads_packed(self) -> bool:  # type: ignore[override]
        """Whether the product is the plain one: not with `fp32_logits` and a narrower weight."""
        return not self.config.fp32_logits or self.weight.dtype in (torch.float32, torch.float64)

    def forward(self, hidden_states: Tensor) -> Tensor:
        if not self.reads_packed:
            return ops.wide_linear(hidden_states, self.weight, self.bias)
        return super().forward(hidden_states)


class ZayaForCausalLM(ZayaPreTrainedModel, ZayaGenerationMixin, GenerationMixin):  # type: ignore[misc]
    """`ZayaModel` with a language-model head.

    Args:
        config: a `ZayaConfig`, or transformers' own, which is converted.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    #: default of `forward`'s argument, for callers that cannot pass it: False keeps the logits in training
    skip_logits: bool | None = None

    def __init__(self, config: ZayaConfig):
        config = ZayaConfig.from_native(config)
        super().__init__(config)
        self.model = ZayaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = ZayaLMHead(config)
        self.loss_function = causal_lm_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Any] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        skip_logits: bool | None = None,
        routed_experts: Tensor | Sequence[Tensor] | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> ZayaCausalLMOutput:
        """Logits of the next token, and the loss when labels are given.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, output_router_logits,
                routed_experts, past_key_values, and for packed rows cu_seq_lens_q, cu_seq_lens_k, seq_idx: as in
                `ZayaModel.forward`, which says how padding on either side, documents and caches are told.
            labels: ``[B, S]`` int64, not shifted, e.g. `input_ids` itself; -100 marks positions without a target. The
                first token of a document and padding are no targets, so packed rows have the loss of separate ones;
                without any target the loss is 0.
            logits_to_keep: the last n positions only (0: all), or an index tensor.
            skip_logits: return the loss and no logits, which then are never held for all tokens. None: in training with
                labels, unless `logits_to_keep` or another `loss_function` is set; so False: training, and the logits.
            shift_labels: ``[B, S]`` labels that are shifted already; used as they are.
            num_items_in_batch: targets to divide the loss by; those of this call if it is not given.
            z_loss, logit_softcap: as in `causal_lm_loss`.

        Returns:
            a `ZayaCausalLMOutput`.

        Raises:
            ValueError, TypeError: as `ZayaModel.forward`.
        """
        head_is_plain, head_weight = type(self.lm_head) is ZayaLMHead, None
        with_loss = labels is not None or kwargs.get("shift_labels") is not None
        skip, without = skips_logits(self, with_loss, logits_to_keep, skip_logits, head_is_plain)
        if without and inputs_embeds is None and can_share(self.model.embed_tokens, self.lm_head, input_ids):
            check_ids(input_ids, self.config.vocab_size)
            inputs_embeds, head_weight = look_up(self.model.embed_tokens, input_ids)
        outputs = self.model(
            input_ids=input_ids if head_weight is None else None,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            routed_experts=routed_experts,
            return_dict=True,  # also if the config says otherwise
            **kwargs,
        )
        if labels is not None:
            labels = without_boundary_targets(labels, outputs.segments)
        logits, loss = logits_and_loss(
            self,
            outputs.last_hidden_state,
            labels,
            skip=skip,
            without=without,
            head_weight=head_weight,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )
        return ZayaCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
            router_slots=outputs.router_slots,
            tokens_per_slot=outputs.tokens_per_slot,
        )

    def _get_resized_lm_head(self, *args: Any, **kwargs: Any) -> nn.Linear:
        """transformers builds a plain Linear of the new size; keep what ours does."""
        resized = super()._get_resized_lm_head(*args, **kwargs)
        resized.__class__ = ZayaLMHead
        object.__setattr__(resized, "config", self.config)
        return resized
