//! What kernel tests share: a device with poisoned buffers and sentinels, random numbers, launches of one kernel.

#![expect(unsafe_code, reason = "kernels take raw addresses")]
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Mutex;

use bytemuck::Pod;
use half::f16;
use horizon_kernels_cuda::driver::{DevicePtr, Launch, SharedDriver, Stream};
use horizon_kernels_cuda::prefill::Form;

/// Bytes after every buffer that no kernel may touch.
const SENTINEL: [u8; 64] = [0xA5; 64];

/// A device and its memory; everything is given back at the end.
pub struct Bench {
    pub driver: SharedDriver,
    stream: Stream,
    buffers: Mutex<Vec<(DevicePtr, usize)>>,
}

impl Bench {
    pub fn new(driver: SharedDriver) -> Self {
        let stream = driver.stream().expect("a stream");
        Self {
            driver,
            stream,
            buffers: Mutex::default(),
        }
    }

    /// The kernels compiled for the host.
    #[cfg(feature = "emulator")]
    pub fn emulated() -> Self {
        use horizon_kernels_cuda::driver::emulated::{EmulatedDriver, EmulatedOptions};
        Self::new(std::sync::Arc::new(EmulatedDriver::new(
            EmulatedOptions::default(),
        )))
    }

    /// The first card of this machine.
    #[cfg(feature = "gpu")]
    pub fn card() -> Self {
        let driver = horizon_kernels_cuda::driver::cuda::CudaDriver::open(0).expect("a card");
        Self::new(std::sync::Arc::new(driver))
    }

    /// Memory full of NaN, with a sentinel behind it.
    pub fn poisoned(&self, bytes: usize) -> DevicePtr {
        let at = self
            .driver
            .allocate(bytes + SENTINEL.len(), "a test")
            .expect("memory");
        self.write(at.offset(bytes), &SENTINEL);
        self.buffers.lock().expect("no panic").push((at, bytes));
        at
    }

    /// The values, with a sentinel behind them.
    pub fn upload<T: Pod>(&self, values: &[T]) -> DevicePtr {
        let at = self.poisoned(size_of_val(values));
        self.write(at, bytemuck::cast_slice(values));
        at
    }

    pub fn write(&self, at: DevicePtr, bytes: &[u8]) {
        // SAFETY: callers stay inside of a buffer of this bench, and the copy ends before this returns.
        unsafe {
            self.driver
                .copy_to_device(self.stream, at, bytes.as_ptr(), bytes.len())
        }
        .expect("a copy");
        self.driver.synchronize(self.stream).expect("the copy's end");
    }

    pub fn read<T: Pod>(&self, at: DevicePtr, count: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        // SAFETY: as above.
        unsafe {
            self.driver
                .copy_to_host(self.stream, bytes.as_mut_ptr(), at, bytes.len())
        }
        .expect("a copy");
        self.driver.synchronize(self.stream).expect("the copy's end");
        values
    }

    pub fn read_f16(&self, at: DevicePtr, count: usize) -> Vec<f32> {
        self.read::<u16>(at, count)
            .into_iter()
            .map(|v| f16::from_bits(v).to_f32())
            .collect()
    }

    /// Runs one launch to its end.
    pub fn launch<A: Pod>(&self, form: &Form, args: &A) {
        let kernel = self.driver.kernel(form.name).expect(form.name);
        self.driver
            .allow_shared(kernel, form.shared)
            .expect("shared memory");
        let launch = Launch {
            kernel,
            grid: form.grid,
            threads: form.threads,
            shared: form.shared,
            args: bytemuck::bytes_of(args).to_vec(),
            overlaps: true,
            cooperative: false,
        };
        // SAFETY: tests give every kernel buffers of the sizes that its arguments say.
        unsafe { self.driver.launch(self.stream, &launch) }.expect(form.name);
        self.driver.synchronize(self.stream).expect(form.name);
        self.check_sentinels(form.name);
    }

    fn check_sentinels(&self, after: &str) {
        let buffers = self.buffers.lock().expect("no panic").clone();
        for (at, bytes) in buffers {
            let found: Vec<u8> = self.read(at.offset(bytes), SENTINEL.len());
            assert_eq!(found, SENTINEL, "{after} wrote beyond a buffer of {bytes} bytes");
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        for (at, _) in self.buffers.get_mut().expect("no panic").drain(..) {
            self.driver.free(at);
        }
    }
}

/// Numbers that look random; the seed is printed, so that a failure shows it.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        println!("seed {seed}");
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn bits(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// In [-size, size).
    pub fn real(&mut self, size: f32) -> f32 {
        (self.bits() as f32 / 2f32.powi(31) - 1.0) * size
    }

    pub fn reals(&mut self, n: usize, size: f32) -> Vec<f32> {
        (0..n).map(|_| self.real(size)).collect()
    }

    /// FP16 values.
    pub fn halves(&mut self, n: usize, size: f32) -> Vec<f16> {
        (0..n).map(|_| f16::from_f32(self.real(size))).collect()
    }
}

/// What FP32 sums of `n` products may differ by from exact ones, for products that add up to `magnitude`.
pub fn sum_error(n: usize, magnitude: f64) -> f64 {
    (n as f64 + 8.0) * 2f64.powi(-23) * magnitude + 1e-30
}

/// NaN never passes.
#[track_caller]
pub fn close(what: &str, got: f32, want: f64, error: f64) {
    let off = (f64::from(got) - want).abs();
    assert!(
        off <= error,
        "{what}: {got} in place of {want}, {off:e} off, {error:e} allowed"
    );
}

/// Bit patterns, for comparisons that forgive nothing.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
