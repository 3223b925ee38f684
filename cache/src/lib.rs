//! The immutable residency cache: which experts are on the device, and how the others get there.
//!
//! The host keeps a complete, immutable copy of all routed experts. The device holds disposable copies in a fixed
//! number of slots. A slot is in one of four states:
//!
//! ```text
//!            reserve                  publish
//!   spare ────────────▶ filling ────────────────▶ resident
//!     ▲  ▲                 │                          │ evicted by a publication
//!     │  └─────────────────┘ failure before           ▼
//!     │        publication (poisoned)              retiring
//!     └───────────────────────────────────────────────┘
//!        no generation that shows it is held any more
//! ```
//!
//! A miss, from the request to the lease:
//!
//! 1. the step asks for its routed group; its generation does not show all of it;
//! 2. the holder lets go of its generation and queues for the one miss transaction;
//! 3. inside, it looks at the current generation again: what is missing now?
//! 4. it takes spares, waiting for readers to let go of victims of earlier publications if there are too few;
//! 5. record by record: host store → staging buffer → spare slot, several under way at once;
//! 6. when every copy has ended, one store makes the new generation current: the whole group, or nothing;
//! 7. the victims retire; the hold moves to the new generation; the lease gives the addresses.
//!
//! # The contract
//!
//! | clause | kept by |
//! | --- | --- |
//! | C1 the host store is complete before admission, its source closed | [`host_store`] |
//! | C2 it never changes: no mutable access, read-only pages | [`host_store`] |
//! | C3 capacity, spares and staging are fixed before admission | [`geometry`] |
//! | C4 a step captures one generation; acquiring a missing group moves its hold | [`resident_v1`] |
//! | C5 an all-hit group takes no lock that a miss can hold | [`resident_v1`] |
//! | C6 a miss reserves bounded staging and spares, or waits; a waiting holder blocks nobody | `miss` |
//! | C7 pageable memory → staging → slot; staging is reused after its copy has ended | `miss` |
//! | C8 the whole group is published at once, after its last transfer | `miss` |
//! | C9 a victim's slot becomes a spare after its last reader | [`generation`] |
//! | C10 eviction discards | `miss`: there is no copy back |
//! | C11 miss transactions are serialized | [`resident_v1`] |
//! | C12 a failure before publication changes nothing and returns what was reserved | `miss` |
//! | C13 an ambiguous failure faults the cache | [`resident_v1`] |
//! | C14 groups larger than the capacity or the spares run in waves | [`resident_v1`] |
//!
//! This crate knows no model mathematics and no GPU API.

pub mod access;
#[cfg(doctest)]
mod compile_fail;
pub mod generation;
pub mod geometry;
pub mod host_store;
mod lease;
mod miss;
pub mod policy;
pub mod replay;
pub mod report;
pub mod resident_v1;
#[cfg(not(any(loom, feature = "sim")))]
mod seeded;
#[cfg(any(loom, feature = "sim"))]
pub mod seeded;
#[cfg(all(feature = "sim", not(loom)))]
pub mod sim;
pub mod sync;
pub mod trace;

pub use geometry::{Geometry, SetupError};
pub use host_store::{HostRecords, HostStore};
pub use policy::Policy;
pub use resident_v1::{INITIAL_PLACEMENT, PROFILE, ResidentV1};
