//! The device as this crate uses it: memory, streams, events, launches, graphs.
//!
//! [`Driver`] has two implementations: the card, through the installed NVIDIA driver, and, for tests on a machine
//! without one, the same kernel sources compiled for the host (module `emulated`, feature `emulator`).

pub mod cuda;
#[cfg(feature = "emulator")]
pub mod emulated;

use std::sync::Arc;

use thiserror::Error;

/// An address in device memory, or of host memory as the device sees it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// What a card is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Marketing name.
    pub name: String,
    /// Compute capability as one number: 9.0 is 90.
    pub capability: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block may ask for, in bytes.
    pub shared_per_block: usize,
    /// Shared memory of a multiprocessor, in bytes.
    pub shared_per_multiprocessor: usize,
    /// Second-level cache, in bytes.
    pub l2_bytes: usize,
    /// All device memory, in bytes.
    pub memory_bytes: usize,
    /// CUDA version that the driver speaks: 12.8 is 12080.
    pub driver: i32,
}

/// A stream: work in it runs in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub usize);

/// A mark in a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Event(pub usize);

/// A recorded sequence of launches that starts as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Graph(pub usize);

/// A loaded kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kernel(pub usize);

/// One launch of a kernel, whose only argument is a struct passed by value.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Which kernel.
    pub kernel: Kernel,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads a block.
    pub threads: u32,
    /// Dynamic shared memory, in bytes.
    pub shared: u32,
    /// Bytes of the argument struct.
    pub args: Vec<u8>,
    /// May start before its predecessor has ended: it calls `predecessor_wait` itself. Ignored where the card cannot.
    pub overlaps: bool,
    /// All blocks run at once (they wait for one another).
    pub cooperative: bool,
}

/// Page-locked host memory that the device can read and write.
#[derive(Clone, Copy, Debug)]
pub struct Pinned {
    /// Where the host sees it.
    pub host: *mut u8,
    /// Where the device sees it.
    pub device: DevicePtr,
    /// Bytes.
    pub len: usize,
}

/// A call to the device that failed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum DriverError {
    /// No NVIDIA driver, or no card.
    #[error("no CUDA device: {0}")]
    Absent(String),
    /// The driver is older than what the kernels need.
    #[error(
        "the NVIDIA driver speaks CUDA {}.{}; 12.8 or later is needed (driver 570 or later)",
        .found / 1000, .found % 1000 / 10
    )]
    OldDriver {
        /// What it speaks.
        found: i32,
    },
    /// A card that the kernels are not made for.
    #[error("{name} has compute capability {}.{}; 8.0 or later is needed", .capability / 10, .capability % 10)]
    UnsupportedDevice {
        /// Its name.
        name: String,
        /// Its capability.
        capability: u32,
    },
    /// Device memory ran out.
    #[error("the device has no {bytes} bytes left for {what}: {free} of {total} bytes are free")]
    OutOfMemory {
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: usize,
        /// Free then.
        free: usize,
        /// In all.
        total: usize,
    },
    /// A kernel image lacks a function, or could not be loaded.
    #[error("kernel image: {0}")]
    Image(String),
    /// The device is gone for this process: a fault, a reset, an unplugged card. Nothing on it can be used any more.
    #[error("the device is lost: {call}: {reason}")]
    Lost {
        /// The call that met it.
        call: &'static str,
        /// In the driver's words.
        reason: String,
    },
    /// Any other call.
    #[error("{call}: {reason}")]
    Call {
        /// Which call.
        call: &'static str,
        /// In the driver's words.
        reason: String,
    },
}

/// A device. Handles that it gave are valid until it is dropped; addresses until they are freed.
pub trait Driver: Send + Sync {
    /// What it is.
    fn info(&self) -> &DeviceInfo;

    /// Free and total bytes of device memory now.
    ///
    /// # Errors
    /// [`DriverError`].
    fn memory(&self) -> Result<(usize, usize), DriverError>;

    /// Bytes of device memory that were allocated since the driver was made, and number of allocations. Nothing
    /// may be added after admission.
    fn allocated(&self) -> (u64, u64);

    /// The kernel of that name.
    ///
    /// # Errors
    /// [`DriverError::Image`] when no image has it.
    fn kernel(&self, name: &str) -> Result<Kernel, DriverError>;

    /// Lets launches of `kernel` ask for `shared` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// [`DriverError`] when the card has not that much.
    fn allow_shared(&self, kernel: Kernel, shared: u32) -> Result<(), DriverError>;

    /// Blocks of `kernel` that fit on one multiprocessor.
    ///
    /// # Errors
    /// [`DriverError`].
    fn resident_blocks(&self, kernel: Kernel, threads: u32, shared: u32) -> Result<u32, DriverError>;

    /// Device memory, aligned to 256 bytes, filled with 0xFF (NaN in every float format here).
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`].
    fn allocate(&self, bytes: usize, what: &'static str) -> Result<DevicePtr, DriverError>;

    /// Gives device memory back.
    fn free(&self, memory: DevicePtr);

    /// Page-locked, zeroed host memory; not write-combined.
    ///
    /// # Errors
    /// [`DriverError`] when the system refuses.
    fn allocate_pinned(&self, bytes: usize) -> Result<Pinned, DriverError>;

    /// Gives page-locked memory back.
    fn free_pinned(&self, memory: Pinned);

    /// A new stream.
    ///
    /// # Errors
    /// [`DriverError`].
    fn stream(&self) -> Result<Stream, DriverError>;

    /// Queues a copy. The host memory stays valid and unchanged until it has ended; not pinned, it is slow.
    ///
    /// # Safety
    /// `from` is readable and `to` writable device memory for `bytes`; both live until the copy has ended.
    ///
    /// # Errors
    /// [`DriverError`].
    #[expect(unsafe_code, reason = "raw host and device addresses")]
    unsafe fn copy_to_device(
        &self,
        stream: Stream,
        to: DevicePtr,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DriverError>;

    /// Queues a copy to the host.
    ///
    /// # Safety
    /// As [`copy_to_device`](Self::copy_to_device), the other way round.
    ///
    /// # Errors
    /// [`DriverError`].
    #[expect(unsafe_code, reason = "raw host and device addresses")]
    unsafe fn copy_to_host(
        &self,
        stream: Stream,
        to: *mut u8,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), DriverError>;

    /// Queues a fill with one byte value.
    ///
    /// # Safety
    /// `to` is writable device memory for `bytes` until the fill has ended.
    ///
    /// # Errors
    /// [`DriverError`].
    #[expect(unsafe_code, reason = "raw device addresses")]
    unsafe fn fill(&self, stream: Stream, to: DevicePtr, value: u8, bytes: usize) -> Result<(), DriverError>;

    /// Queues a launch.
    ///
    /// # Safety
    /// The argument struct is the one that the kernel declares, and its addresses are valid for what the kernel
    /// reads and writes until it has ended.
    ///
    /// # Errors
    /// [`DriverError`].
    #[expect(unsafe_code, reason = "a launch with raw addresses")]
    unsafe fn launch(&self, stream: Stream, launch: &Launch) -> Result<(), DriverError>;

    /// Records the launches as one graph, in order.
    ///
    /// # Safety
    /// As [`launch`](Self::launch), for as long as the graph is launched.
    ///
    /// # Errors
    /// [`DriverError`].
    #[expect(unsafe_code, reason = "launches with raw addresses")]
    unsafe fn graph(&self, stream: Stream, launches: &[Launch]) -> Result<Graph, DriverError>;

    /// Starts a graph.
    ///
    /// # Safety
    /// As [`graph`](Self::graph).
    ///
    /// # Errors
    /// [`DriverError`].
    #[expect(unsafe_code, reason = "launches with raw addresses")]
    unsafe fn launch_graph(&self, stream: Stream, graph: Graph) -> Result<(), DriverError>;

    /// A new event.
    ///
    /// # Errors
    /// [`DriverError`].
    fn event(&self) -> Result<Event, DriverError>;

    /// Marks the end of what is in the stream now.
    ///
    /// # Errors
    /// [`DriverError`].
    fn record(&self, event: Event, stream: Stream) -> Result<(), DriverError>;

    /// Work that is queued in `stream` from now on starts after `event`.
    ///
    /// # Errors
    /// [`DriverError`].
    fn stream_wait(&self, stream: Stream, event: Event) -> Result<(), DriverError>;

    /// Whether the mark has been passed.
    ///
    /// # Errors
    /// [`DriverError`] of the work before it, too.
    fn passed(&self, event: Event) -> Result<bool, DriverError>;

    /// Milliseconds between two marks that have been passed.
    ///
    /// # Errors
    /// [`DriverError`].
    fn elapsed_ms(&self, from: Event, to: Event) -> Result<f32, DriverError>;

    /// Blocks until everything in the stream has ended.
    ///
    /// # Errors
    /// [`DriverError`] of the work, too.
    fn synchronize(&self, stream: Stream) -> Result<(), DriverError>;
}

/// A device that several parts of the backend share.
pub type SharedDriver = Arc<dyn Driver>;
