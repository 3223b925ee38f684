//! Wrong orderings that the loom models must catch, so that it is known that the models can fail. Outside of loom
//! every question is answered with a constant `false`, and nothing of this is compiled in.

/// A mistake that a model puts into the protocol.
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
}

#[cfg(loom)]
mod model {
    use super::Bug;
    use std::cell::Cell;

    // A model runs all its threads on the thread that started it.
    std::thread_local! {
        static SEEDED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Runs `model` with `bug` in the protocol.
    pub fn with(bug: Bug, model: impl FnOnce()) {
        struct Remove;
        impl Drop for Remove {
            fn drop(&mut self) {
                SEEDED.set(None);
            }
        }
        SEEDED.set(Some(bug));
        let _remove = Remove;
        model();
    }

    pub(crate) fn seeded(bug: Bug) -> bool {
        SEEDED.get() == Some(bug)
    }
}

#[cfg(loom)]
pub(crate) use model::seeded;
#[cfg(loom)]
pub use model::with;

#[cfg(not(loom))]
pub(crate) const fn seeded(_: Bug) -> bool {
    false
}
