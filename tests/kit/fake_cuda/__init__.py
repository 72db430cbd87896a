"""A simulated NVIDIA GPU for tests on machines without one.

    from kit.fake_cuda import fake_cuda

    with fake_cuda() as gpus:
        Trainer(model, args, dataset).train()      # takes the branches for CUDA
    assert not gpus.races

Tensors stay on the CPU; their storages know on which device they "are". Inside the context, a tensor's `device` and
the functions of `torch.cuda` answer as on a machine with GPUs, and:

- an operation on tensors of different devices raises, as on CUDA (`modes`);
- each wait of the host for the device is recorded in `gpus.waits`, and raises under `torch.cuda.set_sync_debug_mode`;
- memory is counted, and limited by `memory`: an allocation beyond it raises `torch.OutOfMemoryError` (`memory`);
  page-locked memory of the host is counted in blocks of powers of two, as torch allocates it;
- operations are ordered by streams, events and the host's waits, and an access that is not ordered after the last
  write is recorded in `gpus.races` (`clocks`), as by CUDA Sanitizer. So are reads of a host copy that may be
  unfinished, writes to host memory that a copy may still read, and memory that is freed while another stream may use
  it;
- each device has a random number generator of its own;
- gloo takes nccl's part.

It is blind to:

- kernels: all numbers are the CPU's, also those of autocast, and every kernel has ended when its launch returns;
- torch's real allocator: rounding to large blocks, fragmentation, the caches of cuBLAS and the CUDA context;
- nccl: its streams, timeouts and errors; a collective runs on the current stream;
- CUDA graphs, torch.compile, sparse tensors, tensor subclasses (DTensor, and so FSDP), pickled CUDA tensors, and
  `torch.autograd.grad` through a copy between devices;
- threads that hand over by a bare lock: those that use Event, Condition, Queue, Future, start or join are ordered;
- races between two threads of the host, and waits by other means than the operators in `waits`.
"""

from kit.fake_cuda.gpus import Gpus, Race, Wait
from kit.fake_cuda.simulator import fake_cuda

__all__ = ["Gpus", "Race", "Wait", "fake_cuda"]
