"""The Triton kernels, one stage a file, with the one choice of block sizes that each is launched with."""
