//! Anonymous memory that weights live in: page-aligned, zeroed, owned by the process, never a file mapping.

use std::io;

use memmap2::{Mmap, MmapMut};

use crate::observe::process;

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
    /// It was read-only once.
    thawed: bool,
}

impl AnonymousMemory {
    /// Reserves `len` zeroed bytes; pages become resident when first touched. Asks for huge pages where the
    /// system has them, which only changes speed.
    ///
    /// # Errors
    /// The system's error when the memory cannot be had.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Ok(Self::of(None, len));
        }
        let map = MmapMut::map_anon(len)?;
        #[cfg(target_os = "linux")]
        // Refused by kernels without transparent huge pages; the mapping is usable all the same.
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self::of(Some(map), len))
    }

    fn of(map: Option<MmapMut>, len: usize) -> Self {
        Self {
            map,
            len,
            thawed: false,
        }
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

    /// The bytes, writable. Counted if the memory was read-only once: what is written then is written back.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.thawed {
            process().thawed_writes.add(1);
        }
        self.map.as_deref_mut().unwrap_or_default()
    }
}

/// A range of anonymous memory that the operating system protects against writing.
#[derive(Debug)]
pub struct FrozenMemory {
    map: Option<Mmap>,
    len: usize,
}

impl AnonymousMemory {
    /// Makes the memory read-only for the rest of its life.
    ///
    /// # Errors
    /// The system's error when it refuses.
    pub fn freeze(self) -> io::Result<FrozenMemory> {
        let map = self.map.map(MmapMut::make_read_only).transpose()?;
        Ok(FrozenMemory { map, len: self.len })
    }
}

impl FrozenMemory {
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

    /// Makes the memory writable again, which is counted. The product never does; shared memory cannot be, since
    /// this takes the whole value.
    ///
    /// # Errors
    /// The system's error when it refuses.
    pub fn thaw(self) -> io::Result<AnonymousMemory> {
        process().protections_lifted.add(1);
        let map = self.map.map(Mmap::make_mut).transpose()?;
        Ok(AnonymousMemory {
            map,
            len: self.len,
            thawed: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::ProcessMark;

    #[test]
    fn lifting_a_protection_and_writing_after_it_are_counted_apart() {
        let mut memory = AnonymousMemory::zeroed(5000).expect("a page or two");
        memory.bytes_mut()[4999] = 7;
        let frozen = memory.freeze().expect("can be protected");
        let mark = ProcessMark::now();
        assert_eq!(frozen.bytes()[4999], 7);
        let mut thawed = frozen.thaw().expect("can be unprotected");
        assert_eq!((mark.protections_lifted(), mark.thawed_writes()), (1, 0));
        thawed.bytes_mut()[0] = 1;
        assert_eq!((mark.protections_lifted(), mark.thawed_writes()), (1, 1));
    }
}
