"""The names of Triton's Gluon dialect that differ between its versions."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Of the warps of a partition, or of the whole block before it is cut into partitions.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Shared memory as another dtype, shape and layout."""
        return memory.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Shared memory as another dtype, shape and layout."""
        return memory._reinterpret(dtype, shape, layout)
