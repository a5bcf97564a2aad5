"""The functions that the tasks name; they are zaya_hf's."""

from zaya_hf.evaluation.code_scoring import (
    pass_1,
    pass_1_to_64,
    run_functions,
    run_functions_plus,
    run_tasks,
    run_tasks_plus,
)

__all__ = ["pass_1", "pass_1_to_64", "run_functions", "run_functions_plus", "run_tasks", "run_tasks_plus"]
