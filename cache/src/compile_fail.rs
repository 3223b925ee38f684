//! What must not compile, each beside a near twin that does.
//!
//! The addresses of a group do not outlive its lease (C9):
//!
//! ```compile_fail
//! use horizon_core::provider::{GroupLease, SlotAddress};
//! fn first<'a>(lease: Box<dyn GroupLease>) -> &'a [SlotAddress] {
//!     lease.wait().expect("readable")
//! }
//! ```
//! ```
//! use horizon_core::provider::{GroupLease, SlotAddress};
//! fn first<'a>(lease: &'a Box<dyn GroupLease>) -> &'a [SlotAddress] {
//!     lease.wait().expect("readable")
//! }
//! ```
//!
//! The host store is not written (C2):
//!
//! ```compile_fail
//! use horizon_cache::host_store::{HostRecords, HostStore};
//! use horizon_core::ids::ExpertId;
//! fn change(store: &mut HostStore) {
//!     store.record(0, ExpertId(0))[0] = 1;
//! }
//! ```
//! ```
//! use horizon_cache::host_store::{HostRecords, HostStore};
//! use horizon_core::ids::ExpertId;
//! fn look(store: &mut HostStore) -> u8 {
//!     store.record(0, ExpertId(0))[0]
//! }
//! ```
//!
//! A step that has given up its hold does not go on with it (C4):
//!
//! ```compile_fail
//! use horizon_core::provider::{ExpertProvider, RoutedGroup};
//! use horizon_core::transport::Completion;
//! fn step(experts: &dyn ExpertProvider, group: &RoutedGroup<'_>) {
//!     let mut hold = experts.capture();
//!     experts.release(hold, Completion::DONE);
//!     let _ = experts.acquire(&mut hold, group, Completion::DONE);
//! }
//! ```
//! ```
//! use horizon_core::provider::{ExpertProvider, RoutedGroup};
//! use horizon_core::transport::Completion;
//! fn step(experts: &dyn ExpertProvider, group: &RoutedGroup<'_>) {
//!     let mut hold = experts.capture();
//!     let _ = experts.acquire(&mut hold, group, Completion::DONE);
//!     experts.release(hold, Completion::DONE);
//! }
//! ```
//!
//! A record in a slot is read, not written, by whoever leased it (C10):
//!
//! ```compile_fail
//! use horizon_core::provider::{SlotAddress, SlotMemory};
//! fn change(slots: &dyn SlotMemory, address: SlotAddress) {
//!     let mut record = slots.record(address);
//!     record[0] = 1;
//! }
//! ```
//! ```
//! use horizon_core::provider::{SlotAddress, SlotMemory};
//! fn look(slots: &dyn SlotMemory, address: SlotAddress) -> u8 {
//!     let record = slots.record(address);
//!     record[0]
//! }
//! ```
//!
//! Sizes do not change after admission (C3):
//!
//! ```compile_fail
//! fn grow(cache: &mut horizon_cache::ResidentV1) {
//!     cache.geometry().capacity += 1;
//! }
//! ```
//! ```
//! fn look(cache: &mut horizon_cache::ResidentV1) -> usize {
//!     cache.geometry().capacity + 1
//! }
//! ```
