//! The only import of atomics, locks and reference counts in this crate: the standard library's, or loom's when the
//! crate is built with `--cfg loom`, which then tries every order in which threads can meet.

#[cfg(not(loom))]
mod real {
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    pub use std::sync::{Arc, Condvar, Mutex, MutexGuard};

    /// A shared pointer that readers load without a lock while a writer replaces it.
    pub struct Swap<T>(arc_swap::ArcSwap<T>);

    impl<T> Swap<T> {
        /// Holds `value`.
        pub fn new(value: Arc<T>) -> Self {
            Self(arc_swap::ArcSwap::new(value))
        }

        /// The current value. Wait-free.
        pub fn load(&self) -> Arc<T> {
            self.0.load_full()
        }

        /// Replaces the value.
        pub fn store(&self, value: Arc<T>) {
            self.0.store(value);
        }
    }
}

#[cfg(loom)]
mod real {
    pub use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
    pub use loom::sync::{Arc, Condvar, Mutex, MutexGuard};

    /// A model of the pointer swap: loom cannot look inside `arc-swap`, which has its own proof.
    pub struct Swap<T>(Mutex<Arc<T>>);

    impl<T> Swap<T> {
        /// Holds `value`.
        pub fn new(value: Arc<T>) -> Self {
            Self(Mutex::new(value))
        }

        /// The current value.
        pub fn load(&self) -> Arc<T> {
            super::lock(&self.0).clone()
        }

        /// Replaces the value.
        pub fn store(&self, value: Arc<T>) {
            *super::lock(&self.0) = value;
        }
    }
}

/// The standard library's reference count, also under loom: for what crosses the boundary of this crate.
pub use std::sync::Arc as Shared;
/// The standard library's, also under loom: for access records, which order nothing and may be torn.
pub use std::sync::atomic::AtomicU64 as RecordU64;

use std::sync::PoisonError;

pub use real::{Arc, AtomicBool, AtomicU32, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, Swap};

/// Locks, also after a holder has panicked: what the locks protect is consistent between statements, and a cache
/// that panicked inside a transaction has been faulted by its guard.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
