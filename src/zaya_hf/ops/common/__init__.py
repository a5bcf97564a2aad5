"""What the operators share: which GPUs the kernels are made for, their configurations, how they are launched, and how
they become operators of torch. `common.triton` alone imports Triton."""
