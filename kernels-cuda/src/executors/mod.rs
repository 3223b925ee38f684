//! Executors of routed groups: which kernels each launches, and in what form.

pub mod grouped_t3;
