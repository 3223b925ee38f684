//! Mistakes that the loom models and the oracles of the simulation must catch, so that it is known that they can fail.
//! Outside of loom and of the feature `sim` every question is answered with a constant `false`, and nothing of this is
//! compiled in.

/// A mistake that a test puts into the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Victims become spares at the publication, whoever still holds a generation that shows them.
    FreeVictimsAtOnce,
    /// A staging buffer is filled again while its last copy may still read it.
    ReuseStagingAtOnce,
    /// A holder keeps its generation while it waits for the miss lock.
    KeepHoldWhileQueueing,
    /// The generation becomes current before its copies have ended.
    PublishBeforeCopies,
    /// What is missing is decided before the miss lock is held.
    LookBeforeQueueing,
    /// A holder that waited for the miss lock does not ask again whether the cache has faulted.
    MissFaultWhileQueueing,
    /// The fault flag is raised before its reason is written.
    FaultBeforeReason,
    /// A hold is let go without waiting for the device work that reads it.
    ForgetDeviceWork,
    /// A group is published although one of its copies has failed.
    PublishAfterFailure,
    /// The slots of a transaction that failed are given back as they are.
    LeaveHalfRecords,
}

#[cfg(any(loom, feature = "sim"))]
mod model {
    use super::Bug;
    use std::cell::Cell;

    // A loom model runs all its threads on the thread that started it; a simulation has one.
    std::thread_local! {
        static SEEDED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Runs `test` with `bug` in the protocol.
    pub fn with<T>(bug: Bug, test: impl FnOnce() -> T) -> T {
        struct Remove;
        impl Drop for Remove {
            fn drop(&mut self) {
                SEEDED.set(None);
            }
        }
        SEEDED.set(Some(bug));
        let _remove = Remove;
        test()
    }

    pub(crate) fn seeded(bug: Bug) -> bool {
        SEEDED.get() == Some(bug)
    }
}

#[cfg(any(loom, feature = "sim"))]
pub(crate) use model::seeded;
#[cfg(any(loom, feature = "sim"))]
pub use model::with;

#[cfg(not(any(loom, feature = "sim")))]
pub(crate) const fn seeded(_: Bug) -> bool {
    false
}
