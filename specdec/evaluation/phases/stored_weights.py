"""`specdec/models/weight_storage.py` under the name by which tools/gpu_packed.py imports it."""

from specdec.models.weight_storage import StoredWeights, packed_of, stored_weights

__all__ = ["StoredWeights", "packed_of", "stored_weights"]
