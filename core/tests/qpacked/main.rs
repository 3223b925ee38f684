//! `qpacked` v1: the golden vectors bit for bit, and what holds for any weights.

mod properties;
mod support;
mod vectors;
