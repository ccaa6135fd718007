"""Why a drafter is accepted less than it could be: one change of a pair at a time, measured."""
