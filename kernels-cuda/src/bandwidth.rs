//! The card's read bandwidth, measured: the yardstick that decode speed is held against.

use crate::args::ReadArgs;
use crate::driver::{DevicePtr, Driver, DriverError, Launch, SharedDriver};

/// Bytes read a pass, where they are free; far more than a second-level cache holds.
const MOST_BYTES: usize = 2 << 30;
const WHAT: &str = "a measurement of bandwidth";
/// Below this a cache would take part.
const LEAST_BYTES: usize = 256 << 20;
/// Passes that count; the median does.
const PASSES: usize = 20;
/// Passes before them.
const WARM_UP: usize = 3;

/// Memory that is given back in any case.
struct Borrowed<'a>(&'a dyn Driver, DevicePtr);

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        self.0.free(self.1);
    }
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadBandwidth {
    /// Bytes of a pass.
    pub bytes: u64,
    /// Passes.
    pub passes: u32,
    /// Bytes a second of the median pass.
    pub bytes_per_second: f64,
}

/// The speed of a read-only reduction over up to 2 GiB of free device memory.
///
/// # Errors
/// [`DriverError::OutOfMemory`] when too little is free to tell; any other failure of the device.
pub fn read_bandwidth(driver: &SharedDriver) -> Result<ReadBandwidth, DriverError> {
    let (free, total) = driver.memory()?;
    let bytes = MOST_BYTES.min(free / 2) & !0xFFFF;
    if bytes < LEAST_BYTES {
        return Err(DriverError::OutOfMemory {
            what: WHAT,
            bytes: LEAST_BYTES,
            free,
            total,
        });
    }
    read_bandwidth_over(driver, bytes, PASSES)
}

/// The same over `bytes`, a multiple of 16, with the median of `passes`.
///
/// # Errors
/// [`DriverError`].
///
/// # Panics
/// When `bytes` is no multiple of 16, or there is no pass.
pub fn read_bandwidth_over(
    driver: &SharedDriver,
    bytes: usize,
    passes: usize,
) -> Result<ReadBandwidth, DriverError> {
    assert!(
        bytes.is_multiple_of(16) && passes > 0,
        "{passes} passes over {bytes} bytes"
    );
    let stream = driver.stream()?;
    let from = Borrowed(driver.as_ref(), driver.allocate(bytes, WHAT)?);
    let sum = Borrowed(driver.as_ref(), driver.allocate(1 << 16, WHAT)?);
    let args = ReadArgs {
        from: from.1,
        sum: sum.1,
        words: bytes as u64 / 16,
    };
    let launch = Launch {
        kernel: driver.kernel("read_all")?,
        grid: [driver.info().multiprocessors * 4, 1, 1],
        threads: 512,
        shared: 16,
        args: bytemuck::bytes_of(&args).to_vec(),
        overlaps: false,
        cooperative: false,
    };
    let (start, end) = (driver.event()?, driver.event()?);
    let mut times = Vec::with_capacity(passes);
    for pass in 0..WARM_UP + passes {
        driver.record(start, stream)?;
        // SAFETY: both buffers live until the stream has been synchronized below; `words` are those of `from`.
        #[expect(unsafe_code, reason = "a launch with raw addresses")]
        unsafe {
            driver.launch(stream, &launch)?;
        }
        driver.record(end, stream)?;
        driver.synchronize(stream)?;
        if pass >= WARM_UP {
            times.push(f64::from(driver.elapsed_ms(start, end)?));
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(ReadBandwidth {
        bytes: bytes as u64,
        passes: passes as u32,
        bytes_per_second: bytes as f64 / times[passes / 2] * 1e3,
    })
}
