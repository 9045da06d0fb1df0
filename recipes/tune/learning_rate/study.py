"""The trials of a search as Optuna's studies, one for each stage, in a journal.

Optuna suggests the settings of coarse trials by its tree-structured Parzen estimator (Bergstra et
al. 2011) and stops those that are far behind the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from ...errors import RecipeError
from ...schema.load import differences, with_defaults
from ...schema.recipe import Recipe
from ...schema.sections import Resume
from ..trial import Reading
from .result import State, Tried
from .space import Settings, Space, rounded

JOURNAL = "journal.log"
#: A coarse trial is stopped, from this number of its evaluations on, if it is behind this
#: percentage of those that finished. High rates catch up when the rate falls.
PRUNED_FROM, BEHIND, FEWEST_TO_PRUNE = 2, 80.0, 5


class Study:
    """The trials of a search, of which one at a time runs, in a folder for it alone."""

    def __init__(self, folder: Path, recipe: Recipe, space: Space) -> None:
        self._space, self._seed, self._folder = space, recipe.seed, folder
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        journal = str(folder / JOURNAL)
        pruner = optuna.pruners.PercentilePruner(BEHIND, FEWEST_TO_PRUNE, PRUNED_FROM)
        try:
            backend = JournalFileBackend(journal, JournalFileOpenLock(journal))
            storage = JournalStorage(backend)
            create = partial(optuna.create_study, pruner=pruner, load_if_exists=True)
            self._studies = {
                stage: create(study_name=stage, storage=storage, direction="maximize")
                for stage in ("coarse", "fine")
            }
        except (ValueError, KeyError) as error:
            raise RecipeError(
                f"--out: {journal} cannot be read: {error}; valid: another folder"
            ) from error
        self._check(recipe)
        for study in self._studies.values():
            for trial in study.get_trials(states=(TrialState.RUNNING,)):
                study.tell(trial.number, state=TrialState.FAIL)  # its process was killed

    def _check(self, recipe: Recipe) -> None:
        """Raise RecipeError if the folder holds a study of something else; else note what of."""
        data = recipe.data.model_copy(update={"path": None})  # which may have been moved
        same = recipe.model_copy(update={"run_dir": None, "resume": Resume(), "data": data})
        content = {
            "recipe": same.model_dump(mode="json", by_alias=True),
            "ranges": {name: [d.low, d.high] for name, d in self._space.items()},
        }
        now, known = json.loads(json.dumps(content)), self.note("of")
        if known is None:
            self.set_note("of", now)
            return
        known = {**known, "recipe": with_defaults(known["recipe"])}
        if different := differences(known, now):
            raise RecipeError(
                f"--out: {self._folder} holds another study: {different[0]}; valid: another folder"
            )

    def note(self, name: str) -> Any:
        """What was noted of the study; None if nothing was."""
        return self._studies["fine"].user_attrs.get(name)

    def set_note(self, name: str, content: Mapping[str, Any]) -> None:
        """Note something of the study that JSON can hold."""
        self._studies["fine"].set_user_attr(name, content)

    def trials(self) -> list[Tried]:
        """All trials, coarse ones first, in the order in which they began."""
        return [
            Tried.of(stage, trial)
            for stage, study in self._studies.items()
            for trial in study.get_trials(deepcopy=False)
            if "lr" in trial.user_attrs  # it has begun
        ]

    def begin_coarse(self, first: Sequence[Settings]) -> Tried:
        """Begin a coarse trial: with the first settings, then with those that Optuna suggests."""
        number = sum(t.stage == "coarse" and t.counts for t in self.trials())
        study = self._studies["coarse"]
        # By the trials before it only: a resumed study goes on as if it had not ended.
        study.sampler = optuna.samplers.TPESampler(seed=self._seed + number, n_startup_trials=0)
        if number < len(first):
            study.enqueue_trial(first[number]._asdict())
        return self._begin("coarse", self._space)

    def begin_fine(self, settings: Settings, place: int, seed: int) -> Tried:
        """Begin a trial of the fine stage, at a place of its line and with a seed of training."""
        own = settings._asdict()
        fixed = {n: FloatDistribution(own[n], own[n], log=d.log) for n, d in self._space.items()}
        return self._begin("fine", fixed, place=place, seed=seed)

    def _begin(self, stage: str, ranges: Space, **place: int) -> Tried:
        self._trial, self._stage, self._evaluations = self._studies[stage].ask({**ranges}), stage, 0
        self._set(**{name: rounded(value) for name, value in self._trial.params.items()}, **place)
        return self._tried()

    def _tried(self) -> Tried:
        """The trial that runs, or ended last."""
        trials = self._studies[self._stage].get_trials(deepcopy=False)
        return Tried.of(self._stage, trials[self._trial.number])

    def report(self, reading: Reading) -> bool:
        """Note an evaluation of the trial that runs; whether it is a coarse one that is behind."""
        self._evaluations += 1
        loss = reading.loss if math.isfinite(reading.loss) else None
        self._set(top1=reading.top1, loss=loss, epochs=reading.epoch)
        self._trial.report(_value(reading.top1, loss), self._evaluations)
        return self._stage == "coarse" and self._trial.should_prune()

    def tell(self, state: State, **known: float) -> Tried:
        """Note how the trial that runs ended, and its epochs and seconds."""
        self._set(state=state, **known)
        study, number, ended = self._studies[self._stage], self._trial.number, self._tried()
        if state == "finished":
            study.tell(number, _value(ended.top1, ended.loss))
        else:
            study.tell(number, state=TrialState.PRUNED if ended.counts else TrialState.FAIL)
        return ended

    def _set(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            self._trial.set_user_attr(name, value)


def _value(top1: float | None, loss: float | None) -> float:
    """What the sampler and the pruner see: the accuracy, and of equal ones the loss."""
    return (top1 or 0.0) - (99.0 if loss is None else min(loss, 99.0)) / 100
