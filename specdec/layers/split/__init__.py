"""One model on several devices: each rank's share of a layer, and how ranks run layers together."""
