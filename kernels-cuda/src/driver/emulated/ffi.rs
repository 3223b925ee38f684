//! The C++ side of the emulator (`emulator/fibers.h`): its kernel table, launches, and memory between guard pages.

#![expect(unsafe_code, reason = "calls into the emulator's C++")]

use std::ffi::{CStr, c_char, c_int, c_void};

use crate::driver::Launch;

/// `hz_kernel`: an entry of the table.
#[repr(C)]
struct RawKernel {
    name: *const c_char,
    threads: u32,
    blocks: u32,
    args: usize,
    call: unsafe extern "C" fn(*const c_void),
}

/// `hz_request`: a launch.
#[repr(C)]
struct RawRequest {
    kernel: *const RawKernel,
    args: *const c_void,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    live_blocks: u32,
    reversed: u32,
    patience_ms: u32,
    fault: u64,
}

const _: () = assert!(size_of::<RawKernel>() == 32 && size_of::<RawRequest>() == 56);

unsafe extern "C" {
    static hz_kernels: [*const RawKernel; 0];
    static hz_kernel_count: usize;
    fn hz_run(request: *mut RawRequest, message: *mut c_char, capacity: usize) -> c_int;
    fn hz_memory_take(bytes: usize) -> *mut c_void;
    fn hz_memory_intact(memory: *const c_void, bytes: usize) -> c_int;
    fn hz_memory_give(memory: *mut c_void, bytes: usize);
}

/// A compiled kernel.
#[derive(Clone, Copy)]
pub struct KernelEntry(&'static RawKernel);

// SAFETY: the table is constant data of the program, written by the build script.
unsafe impl Send for KernelEntry {}
// SAFETY: as above.
unsafe impl Sync for KernelEntry {}

impl KernelEntry {
    pub fn name(self) -> &'static str {
        // SAFETY: the build script writes names as C string literals, which live as long as the program.
        let name = unsafe { CStr::from_ptr(self.0.name) };
        name.to_str().unwrap_or("?")
    }

    /// Most threads a block may have.
    pub fn threads(self) -> u32 {
        self.0.threads
    }

    /// Blocks that its registers let fit on a multiprocessor.
    pub fn blocks(self) -> u32 {
        self.0.blocks
    }

    /// Bytes of its argument struct.
    pub fn args(self) -> usize {
        self.0.args
    }
}

/// All kernels that the build script found.
pub fn kernels() -> Vec<KernelEntry> {
    // SAFETY: `hz_kernels` has `hz_kernel_count` entries, each a pointer to constant data (build script, `table`).
    let table =
        unsafe { std::slice::from_raw_parts((&raw const hz_kernels).cast::<&RawKernel>(), hz_kernel_count) };
    table.iter().map(|k| KernelEntry(k)).collect()
}

/// How launches are run.
#[derive(Clone, Copy)]
pub struct Manner {
    pub live_blocks: u32,
    pub reversed: bool,
    pub patience_ms: u32,
}

/// Why a launch failed, and the address of a fault, if one was the reason.
pub struct Failure {
    pub reason: String,
    pub fault: Option<u64>,
}

/// Runs a launch to its end.
///
/// # Safety
/// The argument struct is the kernel's, of [`KernelEntry::args`] bytes, and its addresses are valid for what the
/// kernel reads and writes, or lie in memory that no one has.
pub unsafe fn run(kernel: KernelEntry, launch: &Launch, manner: Manner) -> Result<(), Failure> {
    // Aligned as any struct of vectors may need.
    let mut args = vec![0u128; launch.args.len().div_ceil(16)];
    bytemuck::cast_slice_mut::<u128, u8>(&mut args)[..launch.args.len()].copy_from_slice(&launch.args);
    let mut request = RawRequest {
        kernel: kernel.0,
        args: args.as_ptr().cast(),
        grid: launch.grid,
        threads: launch.threads,
        shared: launch.shared,
        live_blocks: manner.live_blocks,
        reversed: manner.reversed.into(),
        patience_ms: manner.patience_ms,
        fault: 0,
    };
    let mut message = [0u8; 4096];
    // SAFETY: the request is laid out as in fibers.h (asserted sizes); `args` and `message` outlive the call; the rest
    // is the caller's promise.
    let failed = unsafe { hz_run(&raw mut request, message.as_mut_ptr().cast(), message.len()) };
    if failed == 0 {
        return Ok(());
    }
    let text = CStr::from_bytes_until_nul(&message).unwrap_or_default();
    Err(Failure {
        reason: text.to_string_lossy().trim_end_matches(';').to_owned(),
        fault: (request.fault != 0).then_some(request.fault),
    })
}

/// Memory with guards around it; released when dropped.
pub struct Guarded {
    at: *mut u8,
    len: usize,
}

// SAFETY: it owns its memory, and hands out addresses only.
unsafe impl Send for Guarded {}
// SAFETY: as above.
unsafe impl Sync for Guarded {}

impl Guarded {
    /// `len` bytes, each `value`; none when the system has no more.
    pub fn new(len: usize, value: u8) -> Option<Self> {
        // SAFETY: takes fresh memory; the fill stays within it.
        unsafe {
            let at = hz_memory_take(len).cast::<u8>();
            if at.is_null() {
                return None;
            }
            at.write_bytes(value, len);
            Some(Self { at, len })
        }
    }

    pub fn address(&self) -> *mut u8 {
        self.at
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has written beside it.
    pub fn intact(&self) -> bool {
        // SAFETY: the pair is one that `hz_memory_take` gave.
        unsafe { hz_memory_intact(self.at.cast(), self.len) != 0 }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the pair is one that `hz_memory_take` gave, given back once.
        unsafe { hz_memory_give(self.at.cast(), self.len) };
    }
}

/// Copies between addresses that the driver has found to be its own, or the caller's.
///
/// # Safety
/// Both ranges are valid for `bytes` and do not overlap.
pub unsafe fn copy(to: u64, from: u64, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
}

/// Fills a range with one value.
///
/// # Safety
/// The range is valid for writes.
pub unsafe fn fill(to: u64, value: u8, bytes: usize) {
    // SAFETY: the caller's promise.
    unsafe { (to as *mut u8).write_bytes(value, bytes) };
}
