"""What a framework holds in the place of what torch's own modules, DDP and pipelines hold, and what it adds up.

Sources of Megatron-LM's: its code at 23e00ed0 (``megatron/core``) and TransformerEngine's 2.11 (``pytorch``). Of
llm-foundry's: its code at 0085285a, and flash-attention's at 058ad35a.
"""

from __future__ import annotations

from typing import NamedTuple

GROUPED = "grouped_matmul"
ADDED_IN_KERNEL = frozenset({"linear", "addmm", GROUPED})
"""Layers whose kernel adds the gradient of weights to what is there, where a framework's does."""


class FrameworkMemory(NamedTuple):
    """How a framework's memory differs from torch's; by itself it does in nothing.

    Attributes:
        fuses: kinds of layers whose operation is one kernel that reads and writes what it is given, without copies of
            another dtype. An ``activation`` is one kernel with the product that alone reads it.
        overwrites_logits: whether a fused loss leaves its gradient where it read; else that is a tensor of its own.
        gradient_dtype: of the buffer that holds all gradients at all times, is exchanged as it is, and is updated from;
            empty where each gradient is a tensor of its own.
        placeholders: whether linear layers add to that buffer in their kernel, and give autograd one tensor for each
            shape of weights, of the weights' dtype, which stays.
        splits_evenly: whether ranks that share the optimizer's state have equal parts of it, to which gradients are
            scattered and of which parameters are gathered; else whole parameters, of gradients that all ranks have.
        gathers_again: whether backward gathers a linear layer's input again where forward gathered it.
        drops_messages: whether stages let go of what they have sent, and receive each message into new memory; else
            every micro-batch has a buffer from the beginning.
        checks_gradients: whether it reads the buffer before it is exchanged, for numbers that are not finite.
        sends_first: whether a stage sends what its last backward made before it exchanges its gradients; else behind
            those that are there with the end of backward.
    """

    fuses: frozenset[str] = frozenset()
    overwrites_logits: bool = False
    gradient_dtype: str = ""
    placeholders: bool = False
    splits_evenly: bool = False
    gathers_again: bool = False
    drops_messages: bool = False
    checks_gradients: bool = False
    sends_first: bool = False


TORCH = FrameworkMemory()
MEGATRON = FrameworkMemory(
    # fusions/fused_bias_swiglu.py keeps its input alone; module/rmsnorm.py; cross_entropy.py writes over the logits.
    fuses=frozenset({"activation", "loss", "norm"}),
    overwrites_logits=True,
    # distributed/param_and_grad_buffer.py, with --accumulate-allreduce-grads-in-fp32, which --bf16 sets.
    gradient_dtype="fp32",
    # tensor_parallel/layers.py, and get_dummy_wgrad of module/base.py.
    placeholders=True,
    # optimizer/distrib_optimizer.py shares out elements, not parameters.
    splits_evenly=True,
    # tensor_parallel/layers.py, and module/layernorm_linear.py of TransformerEngine.
    gathers_again=True,
    # pipeline_parallel/schedules.py, deallocate_output_tensor.
    drops_messages=True,
    # distributed/param_and_grad_buffer.py, check_grads, but for --no-check-for-nan-in-loss-and-grad.
    checks_gradients=True,
    # schedules.py: gradients are exchanged by finalize_model_grads_func; with --overlap-grad-reduce, in stages other
    # than the first, which sends none, by grad_sync_func. Both come behind the last send_backward.
    sends_first=True,
)
LLM_FOUNDRY = FrameworkMemory(
    # llmfoundry/models/mpt/modeling_mpt.py: loss_fn is fused_crossentropy by default, and does not ask for
    # inplace_backward of flash_attn/losses/cross_entropy.py, which is off by default.
    fuses=frozenset({"loss"}),
)
