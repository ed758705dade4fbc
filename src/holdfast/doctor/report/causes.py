"""Every cause the doctor can name: one stable word, what it means in a sentence, and how to fix it.

The words are an interface: they appear in JSON reports and in other people's CI, and do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Cause:
    """`meaning` is written for a reader who has never trained a recurrent policy."""

    meaning: str
    fix: str
    severity: Severity = "error"


CAUSES: dict[str, Cause] = {
    # --- the same input does not give the same output ---------------------------------------------------
    "random-training-leg": Cause(
        "The same data gives a different result each time: something random, such as dropout, is active.",
        "Remove dropout from the recurrent policy, or call .eval() on those layers in both legs. Noise in one leg makes "
        "PPO's probability ratio wrong from the first epoch on.",
    ),
    "batch-statistics": Cause(
        "An environment's output depends on which others are in the batch, as with BatchNorm in training mode.",
        "Replace BatchNorm with LayerNorm, or keep it in eval mode in both legs.",
    ),
    "normaliser-moved": Cause(
        "Running statistics of the observations change during the rollout, so its first and last step see different "
        "normalizers, and training sees a third.",
        "Freeze the normalizer from the start of a rollout to the end of its update, and update it between the two.",
    ),
    "not-repeatable": Cause(
        "The same rollout from a fresh start gives a different result the second time: something besides the memory "
        "changes when the policy steps.",
        "Find what `begin` (or your reset) does not clear: a counter, a cache, a running statistic outside buffers.",
    ),
    "training-moves-memory": Cause(
        "Training reads or changes the live memory, so training depends on the last rollout step, and the rollout "
        "depends on training.",
        "Give the training leg its own start state. It must neither read nor write the memory of the environments.",
    ),
    # --- it does not remember ---------------------------------------------------------------------------
    "memoryless": Cause(
        "Earlier observations have no effect: the state is dropped, or reset at every step.",
        "Carry the returned state into the next call. With TorchRL, add the module's TensorDictPrimer to the "
        "environment; in your own loop, check that a missing flag does not mean 'reset'.",
    ),
    "missing-flags-reset": Cause(
        "Without episode flags, the policy treats every step as the first of an episode.",
        "Treat missing flags as 'no reset': the default of a `done` argument must be False, never True.",
    ),
    # --- it resets wrongly ------------------------------------------------------------------------------
    "never-resets": Cause(
        "Memory of one episode carries over into the next.",
        "Reset the state of an environment before the first observation of its new episode, when `terminated | "
        "truncated` came with that observation.",
    ),
    "truncation-ignored": Cause(
        "Memory is cleared when an episode terminates but not when it is truncated (a time limit).",
        "Use `terminated | truncated` wherever `terminated` (or the old `done`) decides about memory. Only "
        "bootstrapping distinguishes the two.",
    ),
    "termination-ignored": Cause(
        "Memory is cleared at truncations but not at terminations.",
        "Use `terminated | truncated` wherever memory is reset.",
    ),
    "late-by-one": Cause(
        "The state is off by one step: cleared one step after the episode began, or stored one step too late.",
        "Reset before the first observation of the new episode is processed, and store the start state before the "
        "first step of the segment, as a copy.",
    ),
    "early-by-one": Cause(
        "Memory is cleared one step before the episode ends, so the last step has no memory.",
        "The flag of step t belongs to the observation that it came with: store the flag that was known before acting.",
    ),
    "partial-reset": Cause(
        "At the start of an episode only a part of the state is cleared.",
        "Reset every tensor of the state, in every layer, for every environment that starts an episode: for an LSTM "
        "both h and c.",
    ),
    "index-not-mask": Cause(
        "0/1 flags are used as row numbers: environments 0 and 1 are cleared, whichever episode ended.",
        "Convert the flags to bool before indexing (`state[done.bool()]`), or use torch.where.",
    ),
    "common-ends-ignored": Cause(
        "Nothing is cleared if all environments start an episode at the same step, as at a common time limit.",
        "Do not treat flags that are all set as a special case: reset every row whose flag is set.",
    ),
    "resets-everybody": Cause(
        "When one environment's episode ends, the memory of all environments is cleared.",
        "Reset only the rows whose flag is set: torch.where(flag, 0, state).",
    ),
    "reset-does-nothing": Cause(
        "The call that should clear the memory leaves it as it was.",
        "Make the reset method write a fresh state, and test that the next step equals a first step.",
    ),
    "nan-survives": Cause(
        "A NaN in one environment's state stays forever, because the reset multiplies by 0 and 0 * NaN is NaN.",
        "Reset with torch.where(flag, 0, state) or masked_fill instead of `state * (1 - done)`.",
        "warning",
    ),
    # --- training does not see what the rollout saw -----------------------------------------------------
    "starts-from-zeros": Cause(
        "Training starts each segment from an empty memory, although the rollout continued from a full one.",
        "Store the state before the first step of each segment and start training from it.",
    ),
    "reset-dropped-in-training": Cause(
        "The rollout clears memory between episodes; training runs through the segment as if it were one episode.",
        "Pass the episode flags to the training call too, and reset inside the sequence.",
    ),
    "boundary-lost-at-segment-start": Cause(
        "An episode that begins exactly with the segment is trained with the memory of the previous one.",
        "Apply the reset flag of the segment's first step to the stored start state.",
    ),
    "start-state-aliased": Cause(
        "The stored start state changes after it was stored: it is another name for the live state.",
        "Store a copy: state.clone() for tensors, a new dict with cloned tensors for dicts.",
    ),
    "wrong-start-state": Cause(
        "Training starts segments from a state that is neither the rollout's nor empty.",
        "Store, per segment and environment, the state before its first step, and pass exactly that to training.",
    ),
    "legs-differ": Cause(
        "The two legs compute different things even where memory plays no part.",
        "Send both legs through the same code: the same normalization, clamping, precision and heads.",
    ),
    "depends-on-chunking": Cause(
        "The result depends on how a sequence is split into calls.",
        "Use the carried state on every path of the module, for sequences too, and return the state after the last step.",
    ),
    "state-of-another-step": Cause(
        "A call returns the state of a step other than its last one.",
        "Return the state after the last step of the sequence.",
    ),
    "flags-not-bool": Cause(
        "Episode flags of an integer type are misread; the same flags as bool work.",
        "Convert the flags to bool where the data is collected.",
    ),
    # --- something leaks --------------------------------------------------------------------------------
    "wrong-environment": Cause(
        "An environment gets the memory of another one, or depends on its observations.",
        "Keep one row of state per environment id, read and write it by id, and never reorder rows in between.",
    ),
    "layout-swapped": Cause(
        "Time and batch dimensions are confused: rows of the batch are read as time steps.",
        "Check the layout of the sequence call ([T, B, ...] or batch_first) and every reshape around it; test with "
        "different numbers of steps and environments.",
    ),
    "sees-the-future": Cause(
        "In training the output of a step depends on later observations, which the rollout cannot know.",
        "Do not use a bidirectional layer or unmasked attention in a policy.",
    ),
    "padding-leaks": Cause(
        "Padded steps change the state that is passed on.",
        "Stop the state at each row's last real step: pack the sequence, or select the state by length.",
    ),
    "shared-between-agents": Cause(
        "Two agents that use one network share one memory, so each step of one agent changes the memory of the other.",
        "Keep the state outside the network, one memory per agent.",
    ),
    # --- gradients --------------------------------------------------------------------------------------
    "gradient-crosses-reset": Cause(
        "Values are clean, but gradients flow from one episode into the previous one.",
        "Cut the graph at a reset: replace the state with a constant (torch.where with zeros), not with a value computed "
        "from it.",
    ),
    "over-detached": Cause(
        "Gradients do not flow through time: the policy cannot learn what to remember.",
        "Detach the state between segments only, never between the steps of one training segment; with TorchRL, train "
        "inside set_recurrent_mode(True). If the truncation is deliberate, declare it: bptt=, the number of steps.",
    ),
    "truncated-bptt": Cause(
        "Gradients are cut after the number of steps that was declared: truncated backpropagation through time.",
        "Nothing, if this is intended. The policy cannot learn to remember for more steps than this.",
        "note",
    ),
    "gradient-distorted": Cause(
        "Gradients through time have the wrong sign or size: they are not the derivative of what the policy computes.",
        "Between the steps of a segment look for a part of the state that is detached (c but not h), for a backward pass of "
        "your own, and for expressions such as 2 * h.detach() - h.",
    ),
    "gradients-severed": Cause(
        "The training leg gives no gradient to the recurrent weights at all.",
        "Look for no_grad, inference_mode or detach in the training leg, and for an autocast cache filled under no_grad.",
    ),
    "graph-kept": Cause(
        "The carried state keeps the graph of earlier steps: it ends in 'backward through the graph a second time', or "
        "out of memory.",
        "Store state.detach(), and start every training segment from it.",
    ),
    # --- the rest of a policy's life --------------------------------------------------------------------
    "batch-size-baked-in": Cause(
        "The policy works for one number of environments only.",
        "Make the state from the batch size of the observation, or keep memory by environment id.",
    ),
    "inference-tensor-state": Cause(
        "The first state is an inference tensor, which cannot take part in training.",
        "Make the initial state outside torch.inference_mode(), or clone it.",
    ),
    "dtype-baked-in": Cause(
        "The state's dtype does not follow the weights: after .double() or .bfloat16() the policy breaks.",
        "Make the state with weight.new_zeros(...), or give dtype and device explicitly.",
        "warning",
    ),
    "bootstrap-after-reset": Cause(
        "The value of an episode's final observation is computed after the memory was cleared, or with another state "
        "than the current one.",
        "Evaluate V(final observation) with the state before the reset.",
    ),
    "bootstrap-of-another-step": Cause(
        "At a time limit, the value of the previous step is used instead of the value of the final observation.",
        "Evaluate the final observation itself, with the current memory, and keep that memory as it was.",
    ),
    "bootstrap-moves-memory": Cause(
        "Asking for a value changes the memory.",
        "Compute bootstrap values on a copy of the state, and discard the new state.",
    ),
    "eval-never-resets": Cause(
        "The evaluation loop carries memory from one episode into the next.",
        "Reset the state at each episode start in play and evaluation too.",
    ),
    "eval-memoryless": Cause(
        "The evaluation loop does not carry the state from step to step.",
        "Keep the state that each call returns and pass it to the next one.",
    ),
    "eval-differs": Cause(
        "The evaluation loop gives different outputs than the training rollout on the same observations.",
        "Send evaluation through the same code as the rollout: the same normalizer, flags and state handling.",
    ),
    "memory-in-state-dict": Cause(
        "state_dict() holds live memory, whose shape depends on the number of environments.",
        "Register the state as a non-persistent buffer, or keep it outside the module; save memory separately.",
    ),
    "memory-lost-on-resume": Cause(
        "A checkpoint taken in the middle of an episode does not restore the memory.",
        "Save the carried state with the checkpoint, by environment.",
    ),
    "state-grows": Cause(
        "The carried state grows without bound during a long episode.",
        "Check forget-gate biases and input scale; normalize observations or the cell state.",
        "warning",
    ),
    "graph-breaks": Cause(
        "torch.compile cannot take the training leg as one graph.",
        "See the reasons listed; data-dependent Python branches and namespace objects are the usual ones.",
        "warning",
    ),
    "check-failed-to-run": Cause(
        "A check ended with an exception, so what it protects was not examined.",
        "Run the call named in the evidence by hand; a policy should not fail there.",
        "warning",
    ),
    "examined-in-place": Cause(
        "The policy could not be copied, so the original was examined: weights and buffers are as before, memory is not.",
        "Make it deep-copyable, or examine it before it is in use.",
        "note",
    ),
    "outputs-left-out": Cause(
        "Some of what the policy returns changes from call to call, such as sampled actions, and was not compared.",
        "Return logits or a distribution, too, or say with output= what to compare.",
        "note",
    ),
    "resets-are-the-callers": Cause(
        "The module does not know about episodes: its caller must split sequences at their boundaries.",
        "Nothing, if your code does this. Holdfast's cores take `resets` and need no splitting.",
        "note",
    ),
}
