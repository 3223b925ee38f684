//! What a step holds: a generation, and the slot addresses of a group in it.

use std::any::Any;

use horizon_core::ids::GenerationId;
use horizon_core::provider::{CacheFault, GroupLease, Hold, SlotAddress};

use crate::generation::Generation;
use crate::sync::{Arc, Shared};

/// One generation, as holders share it.
pub struct Snapshot {
    pub(crate) generation: Generation,
}

/// The addresses of a routed group.
pub(crate) struct Lease {
    pub addresses: Vec<SlotAddress>,
    /// While this generation is held, none of its slots is written.
    pub _holds: Arc<Snapshot>,
}

impl GroupLease for Lease {
    fn wait(&self) -> Result<&[SlotAddress], CacheFault> {
        Ok(&self.addresses)
    }
}

/// What [`Hold::keep`] is here: a generation, or nothing while its holder waits in the miss queue.
struct Held(Option<Arc<Snapshot>>);

/// A hold on `snapshot`.
pub(crate) fn held_by(snapshot: Arc<Snapshot>) -> Hold {
    Hold {
        generation: snapshot.generation.id(),
        keep: Shared::new(Held(Some(snapshot))),
    }
}

/// A hold on nothing.
pub(crate) fn nothing_held() -> Hold {
    Hold {
        generation: GenerationId(0),
        keep: Shared::new(Held(None)),
    }
}

/// The generation that `hold` holds, if it is one of this cache.
pub(crate) fn held(hold: &Hold) -> Option<Arc<Snapshot>> {
    let keep: &(dyn Any + Send + Sync) = hold.keep.as_ref();
    keep.downcast_ref::<Held>().and_then(|h| h.0.clone())
}
