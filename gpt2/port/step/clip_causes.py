"""Causes in the clipping: compare what happens to the gradient before the update with the norm that it should be clipped to."""

from __future__ import annotations

from gpt2.port.step.causes import cause
from gpt2.port.step.clipping import BITES, LIMITS, Clip, ClipKind, ClipReading
from gpt2.port.step.trained import Stage


def clip_stage(reading: ClipReading, wanted: float | None, odd: str) -> Stage:
    """Return the causes in a reading of the clipping.

    ``wanted``: the norm to clip to; 0 for no clipping, None where nothing is said. ``odd``: words for the parameters whose
    gradients change in an unknown way.
    """
    stage = Stage()
    if reading.odd:
        stage.leave_open(f"the gradient of {odd} is changed before the update in a way that is not known")
        return stage
    evidence = f"gradients of norms up to {reading.largest:.3g}, before and after"
    clip = reading.clip
    found: tuple[str, str] | None = None
    if clip is None:
        if wanted and reading.largest > wanted * BITES:
            found = "clip-missing", f"norms up to {reading.largest:.4g} are left as they are"
        elif wanted is None:
            stage.notes.append(f"read off: no clipping (norms up to {reading.largest:.3g})")
    elif wanted == 0:
        found = "clip-unwanted", f"it is clipped to {clip.limit:.6g}"
    elif clip.kind is ClipKind.ENTRY:
        found = "clip-by-value", f"entries beyond {clip.limit:.6g} are cut"
    elif clip.kind in (ClipKind.PARAMETER, ClipKind.STACK):
        whose = "parameter" if clip.kind is ClipKind.PARAMETER else "stack of parameters"
        found = "clip-per-tensor", f"that of each {whose} is clipped to {clip.limit:.6g}"
    elif clip.kind is not ClipKind.NORM:
        found = "clip-norm", f"its {clip.kind.value} is clipped to {clip.limit:.6g}"
    elif _before_unscaling(clip, reading.factor, wanted):
        detail = f"the gradient, still multiplied by {1 / reading.factor:g}, is clipped to {clip.limit / reading.factor:.6g}"
        found = "clip-before-unscaling", detail
    elif wanted is None:
        stage.notes.append(f"read off: gradients are clipped to a norm of {clip.limit:.4g}")
    elif abs(clip.limit / wanted - 1) > 1e-3:
        found = "clip-threshold", f"the norm is clipped to {clip.limit:.6g}, not {wanted:g}"
    if reading.passed:
        detail = f"in {len(reading.passed)} of the updates norms up to {max(reading.passed):.4g} are left as they are"
        if wanted is None:
            stage.notes.append(f"read off: {detail}")
        elif wanted:
            stage.causes.append(cause("clip-missing", "gradient", detail, evidence))
    if found is not None:
        name, detail = found
        stage.causes.append(cause(name, "gradient", detail, evidence))
        stage.error = 1.0
    return stage


def _before_unscaling(clip: Clip, factor: float, wanted: float | None) -> bool:
    """Return whether the limit is a usual one for the gradient as a GradScaler has multiplied it."""
    before = clip.limit / factor  # in units of the gradient before unscaling
    usual = any(abs(before / value - 1) < 1e-3 for value in ((wanted,) if wanted else LIMITS))
    return factor < 0.02 and usual and not (wanted and abs(clip.limit / wanted - 1) < 1e-3)
