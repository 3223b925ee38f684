//! Kernels of steps of many rows, and executor `grouped-t3`, against formulas in FP64.

#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "test data is small"
)]

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod grouped;
mod linear;
mod rows;

/// Every test on the kernels compiled for the host (feature `emulator`), and on a card (feature `gpu`).
macro_rules! on_devices {
    ($($test:ident, $gpu:ident;)*) => { $(
        #[cfg(feature = "emulator")]
        #[test]
        fn $test() {
            super::$test(&crate::common::Bench::emulated());
        }

        #[cfg(feature = "gpu")]
        #[test]
        fn $gpu() {
            super::$test(&crate::common::Bench::card());
        }
    )* };
}
pub(crate) use on_devices;
