"""`GradientExchange`: gradients summed during a backward pass that a process may abort."""

from __future__ import annotations

import dataclasses
import enum
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from trainer_kit.utils.foreach import copy_all
from trainer_kit.utils.pytree import strides_of_copy

_FIRST_BYTES, _BUCKET_BYTES = 2**20, 25 * 2**20  # those of torch's DistributedDataParallel


class _Stage(enum.Enum):
    """Stage of a step's exchange."""

    IDLE = enum.auto()
    OPEN = enum.auto()  # hooks send buckets
    SENT = enum.auto()  # all buckets are sent


@dataclasses.dataclass(eq=False)
class _Bucket:
    """Gradients that are sent together.

    Attributes:
        parameters: Their parameters, all of one dtype.
        missing: Parameters without a complete gradient in this backward pass.
        summed: Memory of the gradients, which holds their mean once `work` is done; None before the bucket is sent.
        sent: What is reduced: `summed`, or its copy in bfloat16.
        work: The collective.
    """

    parameters: list[torch.nn.Parameter]
    missing: set[torch.nn.Parameter]
    summed: torch.Tensor | None = None
    sent: torch.Tensor | None = None
    work: dist.Work | None = None

    def views(self) -> list[torch.Tensor]:
        """Return each gradient's part of `summed`."""
        assert self.summed is not None
        parts = self.summed.split([parameter.numel() for parameter in self.parameters])
        return [
            part.as_strided(parameter.shape, strides_of_copy(parameter))
            for parameter, part in zip(self.parameters, parts, strict=True)
        ]


class GradientExchange:
    """Gradients of a model, averaged over all processes while the backward pass computes the rest of them.

    DistributedDataParallel cannot continue after an error in a backward pass, and the other processes wait forever.
    Here a process whose pass failed sends zeros in place of what is missing (`abandon`), so that all processes send the
    same buckets in the same order and then can agree to repeat the step. The buckets and their arithmetic are those of
    `FixedBuckets`, and so are the bits.

    Args:
        module: The user's module.
        bucket_cap_mb: Size of a bucket in MiB; None: torch's default.
        compress: Whether to send the gradients in bfloat16.
    """

    def __init__(self, module: torch.nn.Module, bucket_cap_mb: int | None = None, compress: bool = False) -> None:
        self._parameters = [*module.named_parameters()]
        self._limits = [_FIRST_BYTES, _BUCKET_BYTES]
        if bucket_cap_mb is not None:
            self._limits = [min(_FIRST_BYTES, bucket_cap_mb * 2**20), bucket_cap_mb * 2**20]
        self._compress = compress
        self._trained: list[torch.nn.Parameter] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, _Bucket] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._stage = _Stage.IDLE
        self._next = 0  # number of the next bucket to send
        self._repeated: torch.nn.Parameter | None = None  # whose gradient changed after it was sent

    def begin(self) -> None:
        """Send gradients in the next backward pass."""
        if self._stage is _Stage.IDLE:
            self._divide()
            self._stage = _Stage.OPEN

    def send_rest(self) -> None:
        """Send what the backward pass has not sent; called after it, before any other collective."""
        if self._stage is _Stage.OPEN:
            self._stage = _Stage.SENT
            for bucket in self._buckets[self._next :]:
                self._send(bucket)

    def abandon(self) -> None:
        """Send zeros in place of what a failed pass has not sent, and wait. The gradients are dropped.

        Raises:
            RuntimeError: If there is no memory for the zeros.
        """
        self.begin()
        self._stage = _Stage.SENT
        for parameter in self._trained:
            parameter.grad = None
        for bucket in self._buckets:
            if bucket.work is None:
                bucket.summed = None  # of a bucket that could not be sent
                first, dtype = bucket.parameters[0], torch.bfloat16 if self._compress else bucket.parameters[0].dtype
                zeros = torch.zeros(self._length(bucket), dtype=dtype, device=first.device)
                bucket.work = dist.all_reduce(zeros, async_op=True)
            assert bucket.work is not None
            bucket.work.wait()
            bucket.summed = bucket.sent = None

    def discard(self) -> None:
        """Drop a step that any process could not compute."""
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
        self._reset()

    def finish(self, all_reduce_ints: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Wait for the exchange, and set the gradients.

        Args:
            all_reduce_ints: Returns integers summed over all processes.

        Raises:
            ValueError: If a gradient is sparse on any process, or changed after it was sent.
        """
        self.begin()
        self.send_rest()
        grads = [parameter.grad for parameter in self._trained]
        are_sparse = any(grad is not None and grad.is_sparse for grad in grads)
        *having, sparse = all_reduce_ints([*(grad is not None for grad in grads), are_sparse])
        if sparse:
            raise ValueError("sparse gradients cannot be exchanged with auto_find_batch_size=True; set it to False")
        if self._repeated is not None:
            names = [name for name, parameter in self._parameters if parameter is self._repeated]
            raise ValueError(
                f"the gradient of {names[0]} was computed twice in a backward pass, as reentrant activation "
                "checkpointing does; use use_reentrant=False, or set auto_find_batch_size=False"
            )
        owners = dict(zip(self._trained, having, strict=True))
        for bucket in self._buckets:
            assert bucket.work is not None
            assert bucket.summed is not None
            assert bucket.sent is not None
            bucket.work.wait()
            if bucket.sent is not bucket.summed:
                bucket.summed.copy_(bucket.sent)
            for parameter, view in zip(bucket.parameters, bucket.views(), strict=True):
                parameter.grad = view if owners[parameter] else None
        self._reset()

    def close(self) -> None:
        """Leave the parameters, of which another exchange may take care then."""
        for hook in self._hooks:
            hook.remove()
        self._trained, self._buckets, self._hooks, self._bucket_of = [], [], [], {}
        self._reset()

    def _divide(self) -> None:
        """Divide the parameters that need a gradient into buckets, if there are others than before."""
        trained = [parameter for _, parameter in self._parameters if parameter.requires_grad]
        if [*map(id, trained)] == [*map(id, self._trained)]:
            return
        self.close()
        self._trained = trained
        backwards: list[torch.Tensor] = [*trained[::-1]]
        if trained:
            numbers, _ = dist._compute_bucket_assignment_by_size(  # type: ignore[attr-defined]
                backwards, self._limits, [False] * len(trained)
            )
            self._buckets = [_Bucket([trained[-1 - each] for each in bucket], set()) for bucket in numbers]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        own = weakref.ref(self)

        def ready(parameter: torch.Tensor) -> None:
            if (exchange := own()) is not None:
                exchange._take(parameter)  # type: ignore[arg-type]

        self._hooks = [parameter.register_post_accumulate_grad_hook(ready) for parameter in trained]
        self._reset()

    def _reset(self) -> None:
        self._stage, self._next, self._repeated = _Stage.IDLE, 0, None
        for bucket in self._buckets:
            bucket.missing = {*bucket.parameters}
            bucket.summed = bucket.sent = bucket.work = None

    def _take(self, parameter: torch.nn.Parameter) -> None:
        """Send the buckets that a parameter's gradient completes, in the same order on all processes."""
        if self._stage is not _Stage.OPEN:
            return
        bucket = self._bucket_of[parameter]
        if parameter not in bucket.missing:
            self._repeated = parameter
        bucket.missing.discard(parameter)
        while self._next < len(self._buckets) and not self._buckets[self._next].missing:
            self._send(self._buckets[self._next])
            self._next += 1

    @torch.no_grad()
    def _send(self, bucket: _Bucket) -> None:
        """Pack gradients, of which the parameters get views, and begin to sum them over the processes."""
        first = bucket.parameters[0]
        bucket.summed = torch.empty(self._length(bucket), dtype=first.dtype, device=first.device)
        pairs = [
            (parameter, view)
            for parameter, view in zip(bucket.parameters, bucket.views(), strict=True)
            if parameter.grad is not None and not parameter.grad.is_sparse
        ]
        if len(pairs) < len(bucket.parameters):
            bucket.summed.zero_()
        copy_all([view for _, view in pairs], [parameter.grad for parameter, _ in pairs])  # type: ignore[misc]
        for parameter, view in pairs:
            parameter.grad = view
        if self._compress:
            bucket.sent = bucket.summed.bfloat16().div_(dist.get_world_size())
        else:
            bucket.sent = bucket.summed.mul_(1 / dist.get_world_size())
        bucket.work = dist.all_reduce(bucket.sent, async_op=True)

    def _length(self, bucket: _Bucket) -> int:
        return sum(parameter.numel() for parameter in bucket.parameters)
