"""The doctor's examination: read the pair, measure it, try one change at a time, and name the changes that help.

read      config, weights and names                    signs that are certain
run       an engine of the pair answers the prompts    acceptance by depth; logits against the reference
record    the target reads each text once, densely     everything that a drafter reads is kept
try       each change, after every place of the text   the largest clear gain is named; then others on top of it
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch

from specdec.config import SamplingParams
from specdec.doctor.causes import CAUSES, SIGNS, Cause, Change
from specdec.doctor.diagnosis import (
    MIN_GAIN,
    MIN_GAIN_OF_PROMPTS,
    Acceptance,
    Diagnosis,
    Finding,
    Measured,
    ReferenceCheck,
    Trial,
)
from specdec.doctor.examined_pair import ExaminedPair, pair_facts, watched_drafter
from specdec.draft_models.base import Drafter
from specdec.draft_models.lookup import model_of
from specdec.draft_models.native_mtp.conventions import MEASURED_STEPS, by_token, clear_winner
from specdec.draft_models.native_mtp.mtp_drafter import NativeMtpDrafter
from specdec.engine import Engine
from specdec.errors import ConfigError, counted
from specdec.loading.load_check import CheckedPair, Symptom, drafter_path, visible_symptoms
from specdec.models.published import HELD_OUT_PROBLEMS, published_acceptance
from specdec.progress import progress_bar
from specdec.runtime.drafts.dense_drafts import DENSE_FORMS, RecordedText, dense_drafts, record
from specdec.runtime.request_output import GenerationOutput
from specdec.settings.declared_fields import require_int
from specdec.text.prompt_files import read_prompts

PROMPTS = 8
"""Number of prompts of a diagnosis that is given none."""
NEW_TOKENS = 48
"""Tokens of each answer, by default."""
MODULE_TOKENS = 96
"""Tokens of each answer of a pair with MTP modules, whose conventions differ by one draft in a hundred."""
MAX_NAMED = 3
"""Upper bound on the changes that are named one on top of another."""
NEAR_ONE = 1.1
"""Accepted length below which a drafter is reported even if no change raises it."""
NO_REFERENCE = "drafters of kind {name} have no dense reference; only prompts were changed"


def diagnose(
    engine: Engine,
    prompts: Sequence[str | list[int]] | None = None,
    *,
    chat: bool = True,
    max_new_tokens: int | None = None,
    causes: Sequence[Cause] = CAUSES,
) -> Diagnosis:
    """Find why acceptance is lower than it could be: `findings` names each cause and what to change.

    The pair answers the prompts greedily in a separate engine, then with one setting of the drafter changed at a time;
    a change that raises acceptance clearly is named. `healthy`: no change does, and the acceptance length is not 1.
    It takes time (`Diagnosis.seconds`), and memory for a second K/V cache, so do not run it while requests run.

    prompts: at least 4 texts, or lists of token ids, similar to the pair's intended use; None: word problems.
    chat: texts are turns of a chat; False: raw text.
    max_new_tokens: of each answer; None: 48, for MTP modules 96.

    Raises ConfigError for an engine without a drafter, fewer prompts, texts without a tokenizer, or answers not longer
    than the drafts.
    """
    started = time.perf_counter()
    if engine.drafter is None:
        raise ConfigError("this engine has no drafter, so there is nothing to diagnose; make one with drafter=...")
    if prompts is None:
        if engine.tokenizer is None:
            raise ConfigError("this engine has no tokenizer; give prompts=[[token ids], ...], 4 or more")
        prompts = [problem.text for problem in read_prompts(HELD_OUT_PROBLEMS, PROMPTS)]
    if len(prompts) < 4:
        raise ConfigError(f"{counted(len(prompts), 'prompt')}; 4 or more are needed to tell a gain from chance")
    drafter = model_of(engine.drafter)
    if max_new_tokens is None:
        max_new_tokens = MODULE_TOKENS if isinstance(drafter, NativeMtpDrafter) else NEW_TOKENS
    require_int("max_new_tokens", max_new_tokens, 1, 1 << 30)
    num_steps = engine.spec.num_steps
    if max_new_tokens <= num_steps:  # a token comes before the draft
        raise ConfigError(
            f"max_new_tokens={max_new_tokens}: drafts of num_steps={num_steps} are looked at in answers of "
            f"{num_steps + 1} tokens or more; give that many, or fewer steps"
        )
    pair = ExaminedPair(engine=engine, drafter=drafter, prompts=prompts, chat=chat)
    seen = visible_symptoms(CheckedPair(engine.target, drafter, engine.tokenizer), SIGNS)
    with progress_bar("diagnosing", 2 + len(causes)) as update:
        examination = Examination(pair, max_new_tokens)
        update(1)
        findings = [examination.repair(cause, symptom) for cause, symptom in seen]
        reference = examination.reference()
        if reference is not None and not reference.holds:
            findings.append(_broken_worker(reference))
        update(2)
        trials, named = examination.name_changes(causes, update)
    if not findings and not named and examination.texts and examination.as_loaded.length < NEAR_ONE:
        named = [_untrained(examination.as_loaded.length)]
    final = examination.pair.drafter  # with the named changes
    return Diagnosis(
        read=pair_facts(pair),
        prompts=len(prompts),
        acceptance=examination.as_loaded,
        published=published_acceptance(engine.target.name, drafter_path(drafter) or drafter.name),
        reference=reference,
        findings=(*findings, *named),
        trials=tuple(trials),
        memory=engine.cache.bytes_by_group(),
        conventions=asdict(final.family) if isinstance(final, NativeMtpDrafter) and final is not drafter else None,
        notes=() if type(pair.drafter) in DENSE_FORMS else (NO_REFERENCE.format(name=pair.drafter.name),),
        seconds=time.perf_counter() - started,
    )


class Examination:
    """One pair under examination: the texts of its answers, and the acceptance of `pair.drafter` on these texts."""

    def __init__(self, pair: ExaminedPair, max_new_tokens: int) -> None:
        self.params, self.pair = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True), pair
        self.num_steps = pair.engine.spec.num_steps
        if isinstance(pair.drafter, NativeMtpDrafter) and pair.drafter.max_steps is None:
            # deep enough to show a wrong carry
            self.num_steps = max(self.num_steps, min(MEASURED_STEPS, max_new_tokens - 1))
        outputs = pair.generate(pair.prompt_ids(), self.params)
        self.as_loaded = Acceptance.from_outputs(outputs)
        self.texts, self.measured = self._measure_answers(pair, outputs)

    def repair(self, cause: str, symptom: Symptom) -> Finding:
        """The finding for a symptom, with the gain of its repair; the repaired drafter is used from now on."""
        before = after = None
        if symptom.repaired is not None and self.texts:
            before = self.measured.length
            self.pair = replace(self.pair, drafter=symptom.repaired())
            self.measured = self._measure_texts(self.pair.drafter, self.texts)
            after = self.measured.length
        return Finding(cause=cause, what=symptom.what, do=symptom.do, certain=True, before=before, after=after)

    def reference(self) -> ReferenceCheck | None:
        """Compares the loaded drafter's logits after the first prompt; None if it has no dense form, or a kernel draws
        without logits."""
        if not self.texts:
            return None
        pair, text = self.pair, self.texts[0]
        seen: list[torch.Tensor] = []
        watched = watched_drafter(pair.drafter, text.prompt_len, seen)
        prompt = text.tokens[: text.prompt_len].tolist()
        replace(pair, drafter=watched).generate([prompt], replace(self.params, max_new_tokens=2 + self.num_steps))
        if not seen:
            return None
        rounds = pair.target.dtype.itemsize < 4 or pair.engine.config.kv_dtype is not None
        exact = pair.target.device.type == "cpu" and not rounds
        return ReferenceCheck.from_drafts(seen[0], dense_drafts(pair.drafter, text, self.num_steps), exact)

    def name_changes(self, causes: Sequence[Cause], update: Callable[[int], None]) -> tuple[list[Trial], list[Finding]]:
        """All trials; and the causes whose change raises acceptance clearly, the largest gain first, each on top of the
        others."""
        trials: list[Trial] = []
        named: list[Finding] = []
        while len(named) < MAX_NAMED:
            found = self._largest_gain(causes, trials, {finding.cause for finding in named}, update)
            if found is None:
                break
            cause, change, texts, measured = found
            before, after = self.measured.length, measured.length
            named.append(
                Finding(cause=cause.name, what=change.what, do=change.do, certain=False, before=before, after=after)
            )
            self.pair, self.texts, self.measured = change.pair, texts, measured
        return trials, named

    def _largest_gain(
        self, causes: Sequence[Cause], trials: list[Trial], done: set[str], update: Callable[[int], None]
    ) -> tuple[Cause, Change, list[RecordedText], Measured] | None:
        best: tuple[Cause, Change, list[RecordedText], Measured] | None = None
        for number, cause in enumerate(causes):
            update(2 + number)
            if cause.name in done or not isinstance(self.pair.drafter, cause.kinds):
                continue
            tried = [(change, *self._measure_change(change)) for change in cause.changes(self.pair.drafter, self.pair)]
            others = [now.by_token for _, _, now in tried]
            winner = clear_winner(self.measured.by_token, others) if cause.by_token else None
            for turn, (change, texts, now) in enumerate(tried):
                least = MIN_GAIN if texts is self.texts else MIN_GAIN_OF_PROMPTS
                trial = Trial.compare(cause.name, change.what, now, self.measured, least)
                if cause.by_token:
                    trial = replace(trial, named=turn == winner)
                trials.append(trial)
                if trial.named and (best is None or now.length > best[-1].length):
                    best = cause, change, texts, now
        return best

    def _measure_change(self, change: Change) -> tuple[list[RecordedText], Measured]:
        """A changed drafter is measured on the present texts; changed prompts are answered first."""
        pair = change.pair
        if pair.drafter is self.pair.drafter:
            return self._measure_answers(pair, pair.generate(pair.prompt_ids(), self.params))
        return self.texts, self._measure_texts(pair.drafter, self.texts)

    def _measure_answers(
        self, pair: ExaminedPair, outputs: Sequence[GenerationOutput]
    ) -> tuple[list[RecordedText], Measured]:
        """Texts of the outputs, and lengths on them. Without a dense form no texts, and the engine's greedy lengths."""
        if type(pair.drafter) not in DENSE_FORMS:
            lengths = Acceptance.from_outputs(outputs).lengths
            return [], Measured(lengths, lengths)
        texts = [record(pair.target, output.prompt_token_ids, output.token_ids) for output in outputs]
        return texts, self._measure_texts(pair.drafter, texts)

    def _measure_texts(self, drafter: Drafter, texts: Sequence[RecordedText]) -> Measured:
        """Lengths after every place of the answers."""
        drafts = [dense_drafts(drafter, text, self.num_steps) for text in texts]
        expected = tuple(1 + float(each.expected.mean()) for each in drafts)
        greedy = tuple(1 + float(each.accepted.float().mean()) for each in drafts)
        return Measured(expected, greedy, torch.cat([by_token(each.log_p.exp()) for each in drafts]))


def _untrained(length: float) -> Finding:
    return Finding(
        cause="training",
        what=f"the acceptance length is {length:.2f}, where 1 is no gain, and no change that was tried raises it",
        do="the drafter was trained too little, or for another target: take one made for this target, or train one "
        "(docs/training.md)",
        certain=False,
    )


def _broken_worker(reference: ReferenceCheck) -> Finding:
    return Finding(
        cause="worker",
        what=f"the engine's logits differ from the dense reference by {reference.difference:.2g}; rounding explains "
        f"{reference.bound:g} at most",
        do="try EngineConfig(fused=False) and attention='torch'; if one of them helps, a kernel is wrong: report it",
        certain=True,
    )
