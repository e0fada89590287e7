"""A stand-in for the CUDA driver, so that torch_memory_saver's real binary runs on a machine without a GPU.

``driver.c`` and ``runtime.c`` are built as libcuda and libcudart (``build``), ``driver.Driver`` loads them and
switches failures on, ``saver.stand_in_saver`` puts our ``TorchMemorySaver`` over the real binary, ``placement`` puts
torch's CPU tensors into memory that it manages, and ``megatron.adopt_megatron_buffers`` does so for Megatron-core.

"Device" memory is a file in memory, mapped and unmapped as the binary asks for: touching a paused tensor is a
segmentation fault, as it is an illegal access on a GPU. As with CUDA, a process that forked after using the driver
cannot use it in the child.
"""
