//! Checkpoints, families, packing and text.
