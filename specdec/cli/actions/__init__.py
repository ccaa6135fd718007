"""Actions of the commands, run once their options are read. Heavy imports are allowed here; the files of specdec/cli
load these."""
