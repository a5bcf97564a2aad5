"""The sentences of a quickstart's report that depend on its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zaya_hf.reporting.formats import count, duration, joined, number_word, score, short_count, size
from zaya_hf.reporting.results import TRIAL, Spread, score_value, scores, spread

#: the model that a report is about, where it is among the trained ones
OWN = "zaya"
# A run shorter than this shows that everything works; its scores say next to nothing.
_SHORT_RUN = 200


def focus(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model that the summary is about: ZAYA, else the only one, else none."""
    models = results["models"]
    own = [model for model in models if model["name"] == OWN]
    if own:
        return own[0]
    return models[0] if len(models) == 1 else None


def seeds(results: Mapping[str, Any]) -> list[int]:
    """All seeds that any model was trained from."""
    return sorted({run["seed"] for model in results["models"] for run in model["runs"]})


def headline(results: Mapping[str, Any]) -> str:
    """The title of the page."""
    model, others = focus(results), len(results["models"]) - 1
    if model is None:
        return f"{number_word(others + 1).capitalize()} tiny models, trained from scratch"
    if not others:
        return f"A tiny {model['title']}, trained from scratch"
    return (
        f"A tiny {model['title']} beside {number_word(others)} other{'s' if others > 1 else ''}, trained from scratch"
    )


def summary(results: Mapping[str, Any]) -> str:
    """What was trained on what and how long, where it is clearly above chance, and what one seed can tell."""
    parts = [_training(results), *_outcome(results), _seed_sentence(results)]
    if results["settings"]["steps"] < _SHORT_RUN:
        parts.insert(-1, "A run this short shows that everything works; its scores say next to nothing.")
    return " ".join(parts)


def _training(results: Mapping[str, Any]) -> str:
    models, steps = results["models"], results["settings"]["steps"]
    model = focus(results)
    if model is None:
        who = f"{number_word(len(models)).capitalize()} small models ({joined([m['title'] for m in models])})"
    elif len(models) == 1:
        who = f"A small {model['title']} model"
    else:
        others = [m["title"] for m in models if m is not model]
        what = f"{number_word(len(others))} other small model{'s' if len(others) > 1 else ''}"
        who = f"{model['title']} and {what} ({joined(others)})"
    several = len(models) > 1
    runs = [run for m in models for run in m["runs"]]
    tokens = spread([run["tokens"] for run in runs])
    amount = short_count(tokens.low) if tokens.low == tokens.high else f"up to {short_count(tokens.high)}"
    seconds = spread([run["seconds"] for run in runs])
    shortest, longest = duration(seconds.low), duration(seconds.high)
    time = f"took {shortest}" if shortest == longest else f"took between {shortest} and {longest}"
    were, plural = "were" if several else "was", "s" if steps != 1 else ""
    return (
        f"{who} {were} trained from scratch for {count(steps)} step{plural}, "
        f"{amount} tokens{' each' if several else ''}, on {size(results['corpus']['train_bytes'])} of documentation "
        f"and code that were on the machine ({results['corpus']['origin']}) and on generated sums; "
        f"{'each training' if len(runs) > 1 else 'that'} {time}."
    )


def _outcome(results: Mapping[str, Any]) -> list[str]:
    model = focus(results)
    if model is None:
        return _outcome_of_all(results)
    sentences = [
        f"{model['title']} has {short_count(model['parameters'])} parameters"
        + (
            f", of which {short_count(model['active_parameters'])} work on any one token."
            if model["active_parameters"] < model["parameters"]
            else ", all of which work on every token."
        )
    ]
    chances = {task["chance"] for task in results["tasks"] if task["kind"] == "choice"}
    chance = f"chance ({score(chances.pop(), 'choice')})" if len(chances) == 1 else "chance"
    groups: dict[str, list[str]] = {"all": [], "some": [], "none": []}
    for task in results["tasks"]:
        values = scores(model, task)
        mean = score(spread([score_value(value) for value in values]).mean, task["kind"])
        if task["kind"] == "bits_per_byte":
            unigram = score(results["unigram_bits_per_byte"], task["kind"])
            sentences.append(
                f"It needs {mean} bits for a byte of held-out text, where the frequencies of tokens alone need "
                f"{unigram}."
            )
        else:
            clear = [value["above_chance"] for value in values]
            group = "all" if all(clear) else "some" if any(clear) else "none"
            own_chance = f", chance {score(task['chance'], 'choice')}" if chance == "chance" else ""
            groups[group].append(f"“{task['title']}” ({mean}{own_chance})")
    several = len(model["runs"]) > 1
    how = " from every seed" if several else ""
    if groups["all"]:
        sentences.append(f"It is clearly above {chance}{how} in {joined(groups['all'])}.")
    if groups["some"]:
        sentences.append(f"From some seeds only, it is clearly above {chance} in {joined(groups['some'])}.")
    if groups["none"]:
        again = f"It is not clearly above {chance}" + (" from any seed" if several else "")
        sentences.append(f"{again} in {joined(groups['none'])}.")
    return sentences


def _outcome_of_all(results: Mapping[str, Any]) -> list[str]:
    sentences, models = [], results["models"]
    for task in results["tasks"]:
        means = spread([spread([score_value(s) for s in scores(model, task)]).mean for model in models])
        low, high = score(means.low, task["kind"]), score(means.high, task["kind"])
        if task["kind"] == "bits_per_byte":
            unigram = score(results["unigram_bits_per_byte"], task["kind"])
            sentences.append(
                f"They need between {low} and {high} bits for a byte of held-out text, where the frequencies of tokens "
                f"alone need {unigram}."
            )
        else:
            clear = sum(all(s["above_chance"] for s in scores(model, task)) for model in models)
            who = "all" if clear == len(models) else f"{number_word(clear) if clear else 'none'} of the models"
            sentences.append(
                f"In “{task['title']}” {who} {'is' if clear < 2 else 'are'} clearly above chance "
                f"({low} to {high}, chance {score(task['chance'], task['kind'])})."
            )
    return sentences


def _seed_sentence(results: Mapping[str, Any]) -> str:
    number = len(seeds(results))
    if number == 1:
        if len(results["models"]) == 1:
            return "All of it comes from one seed: another one would give other numbers."
        return "All of it comes from one seed, so differences between models include seed noise and none is resolved."
    return (
        f"Scores are means over {number_word(number)} seeds; how far the seeds are apart is shown beside them, and no "
        "difference within that spread means anything."
    )


def loads(results: Mapping[str, Any]) -> list[str]:
    """How evenly the routers of a model spread the tokens, where that was counted."""
    sentences = []
    for model in results["models"]:
        counted = [run["router_load"] for run in model["runs"] if run["router_load"] is not None]
        if counted:
            layers = [1 + load for run in counted for load in run]
            sentences.append(
                f"In the last steps, the busiest expert of a layer of {model['title']} took {spread(layers).mean:.1f} "
                f"times its fair share of the tokens in the mean, {max(layers):.1f} times in the most uneven layer."
            )
    return sentences


def seed_caveat(results: Mapping[str, Any]) -> list[str]:
    """What the number of seeds allows to say and what not, in two or three paragraphs."""
    number = len(seeds(results))
    if number == 1:
        return [
            f"Every model here was trained once, from seed {seeds(results)[0]}. The seed decides the first weights and "
            "the order of the text, and another seed gives other scores. The intervals do not cover this: they say how "
            "far a score could be off because the questions are few, for these very weights.",
            f"{TRIAL}. So a difference between two models in this report includes seed noise, and none of them is "
            "called resolved.",
        ]
    paragraphs = [
        f"Every model was trained from {number_word(number)} seeds. The tables give the mean, and the least and the "
        "greatest of the seeds; the charts show every seed as a mark of its own. The 95 % intervals belong to single "
        "seeds: they say how far a score could be off because the questions are few.",
        f"{number_word(number).capitalize()} seeds show the size of the noise and measure no difference finely. Where "
        "the ranges of two models overlap, the run does not tell them apart, and where they do not, that is a hint and "
        "no proof.",
    ]
    widest = _widest(results)
    if widest is not None:
        title, task, found = widest
        paragraphs.insert(
            1,
            f"The widest spread is that of {title} in “{task['title']}”: from {score(found.low, task['kind'])} to "
            f"{score(found.high, task['kind'])}. {TRIAL}.",
        )
    return paragraphs


def _widest(results: Mapping[str, Any]) -> tuple[str, dict[str, Any], Spread] | None:
    found = [
        (model["title"], task, spread([score_value(value) for value in scores(model, task)]))
        for model in results["models"]
        for task in results["tasks"]
        if task["kind"] == "choice" and len(model["runs"]) > 1
    ]
    return max(found, key=lambda entry: entry[2].high - entry[2].low, default=None)
