"""The drafters and the protocol they share."""

assert __name__ == "specdec.draft_models", "import specdec.draft_models, not draft_models"
