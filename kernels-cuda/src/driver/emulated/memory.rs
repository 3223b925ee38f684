//! The emulated device's memory: which ranges are whose, and whether anything was written beside them.

use std::collections::BTreeMap;

use super::ffi::Guarded;

struct Allocation {
    memory: Guarded,
    what: &'static str,
}

/// All live allocations, by address.
#[derive(Default)]
pub struct Allocations {
    by_address: BTreeMap<u64, Allocation>,
    /// Bytes in use.
    pub used: usize,
    /// Bytes and number of all allocations ever.
    pub total: (u64, u64),
}

impl Allocations {
    /// Takes note of new device memory.
    pub fn add(&mut self, memory: Guarded, what: &'static str) -> u64 {
        let address = memory.address() as u64;
        self.used += memory.len();
        self.total.0 += memory.len() as u64;
        self.total.1 += 1;
        self.by_address.insert(address, Allocation { memory, what });
        address
    }

    /// Ends an allocation; says what is wrong with it.
    pub fn remove(&mut self, address: u64) -> Result<(), String> {
        let found = self.by_address.remove(&address);
        let found = found.ok_or_else(|| format!("freed address {address:#x}, where no allocation starts"))?;
        self.used -= found.memory.len();
        found.check()
    }

    /// What was written beside an allocation.
    pub fn check(&self) -> Result<(), String> {
        self.by_address.values().try_for_each(Allocation::check)
    }

    /// Whether `bytes` from `address` on lie in one allocation.
    pub fn check_range(&self, address: u64, bytes: usize) -> Result<(), String> {
        let inside = self
            .by_address
            .range(..=address)
            .next_back()
            .is_some_and(|(start, a)| {
                let offset = (address - start) as usize;
                offset <= a.memory.len() && bytes <= a.memory.len() - offset
            });
        if inside {
            return Ok(());
        }
        Err(format!("{bytes} bytes at {address:#x}: {}", self.place(address)))
    }

    /// Where an address is, as seen from the nearest allocation before it.
    pub fn place(&self, address: u64) -> String {
        match self.by_address.range(..=address).next_back() {
            None => "before all allocations".to_owned(),
            Some((start, a)) => {
                let (offset, len) = (address - start, a.memory.len());
                format!("{offset} bytes after the start of {} ({len} bytes)", a.what)
            }
        }
    }
}

impl Allocation {
    fn check(&self) -> Result<(), String> {
        if self.memory.intact() {
            return Ok(());
        }
        let (len, what) = (self.memory.len(), self.what);
        Err(format!("something wrote beside {what} ({len} bytes)"))
    }
}
