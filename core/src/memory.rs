//! Anonymous memory that weights live in: page-aligned, zeroed, owned by the process, never a file mapping.

use std::io;

use memmap2::MmapMut;

/// Alignment of every carved range, in bytes: a cache line, and one AVX-512 register.
pub const ALIGNMENT: usize = 64;

/// `n` rounded up to [`ALIGNMENT`].
#[must_use]
pub fn align_up(n: usize) -> usize {
    n.next_multiple_of(ALIGNMENT)
}

/// A zeroed, page-aligned range of anonymous memory.
#[derive(Debug)]
pub struct AnonymousMemory {
    map: Option<MmapMut>,
    len: usize,
}

impl AnonymousMemory {
    /// Reserves `len` zeroed bytes; pages become resident when first touched. Asks for huge pages where the
    /// system has them, which only changes speed.
    ///
    /// # Errors
    /// The system's error when the memory cannot be had.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self { map: None, len });
        }
        let map = MmapMut::map_anon(len)?;
        #[cfg(target_os = "linux")]
        // Refused by kernels without transparent huge pages; the mapping is usable all the same.
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { map: Some(map), len })
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or_default()
    }

    /// The bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.map.as_deref_mut().unwrap_or_default()
    }
}
