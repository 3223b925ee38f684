//! Engine, sampler, streaming.
