"""What the kernels become for a GPU that need not be there: registers, shared memory, matrix instructions, occupancy.

`compiling.triton` compiles and alone imports Triton; `assembly` reads what came out, `occupancy` does the sums.
"""
