"""What an engine takes: times of whole outputs and of rounds, memory floors, and memory before anything is loaded."""
