"""One model on several devices: what each rank has of a layer, and how ranks go through layers together."""
