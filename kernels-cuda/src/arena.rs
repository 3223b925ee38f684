//! Device memory carved from few allocations: sizes are added up before anything is allocated.

use std::sync::Arc;

use crate::driver::{DevicePtr, Driver, DriverError, SharedDriver};

/// Alignment of every carved piece, in bytes.
const ALIGNMENT: usize = 256;

/// A place in an arena that is not allocated yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    offset: usize,
    /// Bytes.
    pub bytes: usize,
}

/// Adds up pieces of one purpose.
#[derive(Clone, Debug)]
pub struct Carver {
    what: &'static str,
    bytes: usize,
}

impl Carver {
    /// An empty arena for `what`.
    #[must_use]
    pub fn new(what: &'static str) -> Self {
        Self { what, bytes: 0 }
    }

    /// Takes `count` elements of `size` bytes.
    pub fn take(&mut self, count: usize, size: usize) -> Piece {
        let piece = Piece {
            offset: self.bytes,
            bytes: count * size,
        };
        self.bytes = (self.bytes + piece.bytes).next_multiple_of(ALIGNMENT);
        piece
    }

    /// What it is for, and its bytes.
    #[must_use]
    pub fn ledger(&self) -> (&'static str, u64) {
        (self.what, self.bytes as u64)
    }

    /// Allocates it.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`].
    pub fn allocate(&self, driver: &SharedDriver) -> Result<Arena, DriverError> {
        let base = if self.bytes == 0 {
            None
        } else {
            Some(driver.allocate(self.bytes, self.what)?)
        };
        Ok(Arena {
            driver: Arc::clone(driver),
            base,
        })
    }
}

/// An allocated arena; given back when dropped.
pub struct Arena {
    driver: Arc<dyn Driver>,
    base: Option<DevicePtr>,
}

impl Arena {
    /// Where a piece lies.
    ///
    /// # Panics
    /// When the arena is empty.
    #[must_use]
    pub fn at(&self, piece: Piece) -> DevicePtr {
        self.base
            .expect("an arena with pieces has memory")
            .offset(piece.offset)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if let Some(base) = self.base {
            self.driver.free(base);
        }
    }
}

/// Page-locked host memory; given back when dropped.
pub struct PinnedMemory {
    driver: Arc<dyn Driver>,
    memory: crate::driver::Pinned,
}

// SAFETY: the memory is owned, its address is stable, and `&mut self` is needed to write it.
#[expect(unsafe_code, reason = "a raw address of owned memory")]
unsafe impl Send for PinnedMemory {}
// SAFETY: as above; through `&self` it is only read.
#[expect(unsafe_code, reason = "a raw address of owned memory")]
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Reserves zeroed, page-locked memory.
    ///
    /// # Errors
    /// [`DriverError`] when the system refuses.
    pub fn new(driver: &SharedDriver, bytes: usize) -> Result<Self, DriverError> {
        Ok(Self {
            driver: Arc::clone(driver),
            memory: driver.allocate_pinned(bytes.max(1))?,
        })
    }

    /// Where the device sees it.
    #[must_use]
    pub fn device(&self) -> DevicePtr {
        self.memory.device
    }

    /// Where the host sees it.
    #[must_use]
    pub fn host(&self) -> *mut u8 {
        self.memory.host
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.memory.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.memory.len == 0
    }

    /// The bytes, for a caller that knows that the device does not write them now.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: `host` is valid for `len` bytes for the life of `self`; callers read after the device's work has ended.
        #[expect(unsafe_code, reason = "a view of owned memory")]
        unsafe {
            std::slice::from_raw_parts(self.memory.host, self.memory.len)
        }
    }

    /// The bytes, for a caller that knows that the device does not read or write them now.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and `&mut self` makes the view unique on the host.
        #[expect(unsafe_code, reason = "a view of owned memory")]
        unsafe {
            std::slice::from_raw_parts_mut(self.memory.host, self.memory.len)
        }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        self.driver.free_pinned(self.memory);
    }
}
