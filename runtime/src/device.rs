//! The card: whether there is one that can run a model, what the model takes of its memory, and opening it there.

use std::sync::Arc;

use horizon_core::backend::{Backend, BackendError, Plan};
use horizon_core::dense::DenseFormat;
use horizon_core::image::ExpertImage;
use horizon_core::record::ExpertEncoding;
use horizon_core::spec::ModelSpec;
use horizon_kernels_cuda::bandwidth::read_bandwidth;
use horizon_kernels_cuda::driver::cuda::CudaDriver;
use horizon_kernels_cuda::driver::{DriverError, SharedDriver};
use horizon_kernels_cuda::{CudaBackend, CudaTransport, Executor};
use serde::Serialize;
use thiserror::Error;

use crate::bandwidth::Bandwidth;
use crate::residency::STAGING_BUFFERS;
use crate::size::bytes;

/// Opens a card; how is the caller's, so that a test can bring its own.
pub type OpenDevice<'a> = &'a (dyn Fn() -> Result<SharedDriver, DriverError> + Sync);

/// The first card of this machine, all kernels loaded.
///
/// # Errors
/// [`DriverError`] when there is none that can be used.
pub fn first_card() -> Result<SharedDriver, DriverError> {
    Ok(Arc::new(CudaDriver::open(0)?))
}

/// A card that cannot be used.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The driver, or the card.
    #[error("--backend cuda: {0}")]
    Driver(#[from] DriverError),
    /// The model, as it is asked for, does not fit.
    #[error(
        "--backend cuda: the model needs {} of device memory and {} of {} are free on {card}; a shorter --ctx or \
         --dense q8 needs less, --backend cpu none",
        bytes(*.needed), bytes(*.free), bytes(*.total)
    )]
    DoesNotFit {
        /// Name of the card.
        card: String,
        /// Bytes of the ledger.
        needed: u64,
        /// Bytes free on the card.
        free: u64,
        /// Bytes of the card.
        total: u64,
    },
    /// A cache, which this backend does not have.
    #[error(
        "{flag}: partial residency is not available on cuda yet; leave {flag} out to have all experts on the card, or \
         give --backend cpu"
    )]
    PartialResidency {
        /// What asked for it.
        flag: &'static str,
    },
    /// Experts could not be brought.
    #[error("--backend cuda: {0}")]
    Transport(#[from] horizon_core::transport::TransportError),
    /// A limit of the backend.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Memory of a card that a model takes, in bytes: all of it, allocated before the first request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceMemory {
    /// Name of the card.
    pub card: String,
    /// What for.
    pub items: Vec<DeviceItem>,
    /// All of it.
    pub total: u64,
}

/// One entry of a ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceItem {
    /// What for.
    pub name: &'static str,
    /// Bytes.
    pub bytes: u64,
}

impl DeviceMemory {
    /// The ledger of a model under `plan`, with all its experts in slots of `record_bytes`.
    fn new(card: &str, spec: &ModelSpec, plan: &Plan, record_bytes: usize) -> Self {
        let mut ledger = plan.ledger.clone();
        if let Some(moe) = spec.moe() {
            let layers = spec.moe_layers().count();
            let slots = layers * moe.experts;
            ledger.extend(CudaTransport::ledger(slots, record_bytes, layers, moe.experts));
        }
        let item = |(name, bytes)| DeviceItem { name, bytes };
        Self {
            card: card.to_owned(),
            total: ledger.iter().map(|(_, bytes)| bytes).sum(),
            items: ledger.into_iter().map(item).collect(),
        }
    }

    /// One line for people.
    #[must_use]
    pub fn line(&self) -> String {
        let part = |i: &DeviceItem| format!("{} {}", i.name, bytes(i.bytes));
        let parts: Vec<_> = self.items.iter().map(part).collect();
        format!("{}: {} ({})", self.card, bytes(self.total), parts.join(", "))
    }
}

/// A card and a model that fits on it.
#[derive(Clone)]
pub struct Device {
    driver: SharedDriver,
    memory: DeviceMemory,
}

impl Device {
    /// Opens a card if `spec` under `plan` fits on it.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn open(
        open: OpenDevice<'_>,
        spec: &ModelSpec,
        plan: &Plan,
        record_bytes: usize,
    ) -> Result<Self, DeviceError> {
        Self::of(open()?, spec, plan, record_bytes)
    }

    /// An open card, if `spec` under `plan` fits on it.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn of(
        driver: SharedDriver,
        spec: &ModelSpec,
        plan: &Plan,
        record_bytes: usize,
    ) -> Result<Self, DeviceError> {
        let memory = DeviceMemory::new(&driver.info().name, spec, plan, record_bytes);
        let device = Self { driver, memory };
        device.check()?;
        Ok(device)
    }

    /// Whether the ledger fits into what is free now.
    fn check(&self) -> Result<(), DeviceError> {
        let (free, total) = self.driver.memory()?;
        let needed = self.memory.total;
        if needed > free as u64 {
            return Err(DeviceError::DoesNotFit {
                card: self.memory.card.clone(),
                needed,
                free: free as u64,
                total: total as u64,
            });
        }
        Ok(())
    }

    /// What the model takes.
    #[must_use]
    pub fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    /// The card.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        &self.driver
    }

    /// How fast the card reads its memory, measured now.
    ///
    /// # Errors
    /// [`DeviceError`], when too little memory is free for a measurement, too.
    pub fn read_bandwidth(&self) -> Result<Bandwidth, DeviceError> {
        let measured = read_bandwidth(&self.driver)?;
        Ok(Bandwidth {
            memory: self.memory.card.clone(),
            bytes: measured.bytes,
            passes: measured.passes,
            bytes_per_second: measured.bytes_per_second,
        })
    }

    /// Brings all experts of `image` to the card.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub(crate) fn backend(
        &self,
        spec: &ModelSpec,
        image: Option<&ExpertImage>,
        encoding: ExpertEncoding,
        dense: DenseFormat,
        executor: Executor,
    ) -> Result<Box<dyn Backend>, DeviceError> {
        self.check()?;
        let transport = match (image, spec.moe()) {
            (Some(image), Some(moe)) => {
                let layers: Vec<_> = spec.moe_layers().collect();
                let transport = CudaTransport::new(
                    &self.driver,
                    layers.len() * moe.experts,
                    STAGING_BUFFERS,
                    image.record_bytes(),
                    layers,
                    moe.experts,
                )?;
                transport.place_all(image)?;
                Some(Arc::new(transport))
            }
            _ => None,
        };
        let driver = Arc::clone(&self.driver);
        Ok(Box::new(CudaBackend::new(
            driver, transport, encoding, dense, executor,
        )))
    }
}
