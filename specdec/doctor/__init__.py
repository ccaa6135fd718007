"""The doctor: why the drafter of an engine is accepted less than it could be, and what to change."""

from specdec.doctor.diagnosis import Diagnosis
from specdec.doctor.examination import diagnose

__all__ = ["Diagnosis", "diagnose"]
