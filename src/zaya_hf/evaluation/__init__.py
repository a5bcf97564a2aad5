"""Evaluation of language models with lm-evaluation-harness, and the statistics of its results.

What to look for where:

models and suites
    `models`, `loading`, `prompt_checks`, `parameter_counts`, `fingerprints`; `suites`, `suite_files`,
    `task_definitions`; `preflight` and `task_imports` (what is missing); `estimates` and `machine_speed` (what it
    costs)
items
    `data`, `data_packages`, `data_items`, `data_smollm2` (fetched ones), `generated_items`, `generated_math`,
    `generated_logic`
the scorer
    `scorer` (lm-eval's model), `forests`, `likelihoods`, `generating`, `row_cache`, `journal`
programs as answers
    `code_answers`, `code_execution`, `program_runner`, `code_scoring`
runs
    `runs`, `run_key`, `run_results`, `manifest`, `quiet`, `forwarding` (lm-eval's command line)
comparison
    `comparison` and what it consists of: `finished_runs`, `pairing`, `row_statistics`, `suite_means`, `discordant`,
    `comparison_rows`, `comparison_words`; `report`; methods in `statistics`, `bootstrap` and `paired`
contamination
    `contamination`, `corpus_texts`, `contamination_report`
small evaluations within other jobs
    `harness`
"""
