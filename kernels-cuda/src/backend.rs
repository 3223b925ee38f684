//! [`CudaBackend`]: plans the bytes of a model and opens it on a device.

use std::sync::Arc;

use half::f16;
use horizon_core::backend::{Backend, BackendError, CompiledModel, Plan, Regime};
use horizon_core::cpu::numerics::RotaryTable;
use horizon_core::cpu::step::Weights;
use horizon_core::dense::{DenseFormat, DenseStore};
use horizon_core::record::{ExpertEncoding, RecordTiling};
use horizon_core::roles::DenseRole;
use horizon_core::spec::ModelSpec;

use crate::arena::PinnedMemory;
use crate::driver::{DevicePtr, DriverError, SharedDriver, Stream};
use crate::launches::{Executor, Functions};
use crate::model::CudaModel;
use crate::shape::{NAME, Shape};
use crate::tiling::FragmentTiles;
use crate::transport::CudaTransport;
use crate::weights::WeightsPlan;
use crate::workspace::{Workspace, WorkspacePlan};

/// Models on one CUDA device.
pub struct CudaBackend {
    driver: SharedDriver,
    transport: Option<Arc<CudaTransport>>,
    encoding: ExpertEncoding,
    dense: DenseFormat,
    executor: Executor,
}

impl CudaBackend {
    /// A backend that executes experts of `encoding` from the slots of `transport` (`None`: a model without any).
    #[must_use]
    pub fn new(
        driver: SharedDriver,
        transport: Option<Arc<CudaTransport>>,
        encoding: ExpertEncoding,
        dense: DenseFormat,
        executor: Executor,
    ) -> Self {
        Self {
            driver,
            transport,
            encoding,
            dense,
            executor,
        }
    }

    /// The arrangement that records must be loaded in.
    #[must_use]
    pub fn tiling() -> &'static dyn RecordTiling {
        &FragmentTiles
    }

    /// As [`Backend::plan`], known without a device.
    ///
    /// # Errors
    /// As [`Backend::plan`].
    pub fn predict(
        spec: &ModelSpec,
        encoding: ExpertEncoding,
        dense: DenseFormat,
        regime: &Regime,
    ) -> Result<Plan, BackendError> {
        let shape = Shape::new(spec, encoding, dense, regime)?;
        let mut ledger = vec![WeightsPlan::new(spec, &shape).ledger()];
        ledger.extend(WorkspacePlan::new(&shape).ledger());
        Ok(Plan {
            ledger,
            regime: *regime,
        })
    }

    /// Whether `executor` can compute `spec` on the card of `driver`.
    ///
    /// # Errors
    /// [`BackendError::Unsupported`] with the limit.
    pub fn admits(
        executor: Executor,
        spec: &ModelSpec,
        encoding: ExpertEncoding,
        dense: DenseFormat,
        regime: &Regime,
        driver: &SharedDriver,
    ) -> Result<(), BackendError> {
        let shape = Shape::new(spec, encoding, dense, regime)?;
        executor
            .limits(&shape, driver.info())
            .map_err(|reason| BackendError::Unsupported {
                backend: NAME,
                reason,
            })
    }

    /// Opens the model as what it is.
    ///
    /// # Errors
    /// As [`Backend::open`].
    pub fn open_model(
        &self,
        spec: &Arc<ModelSpec>,
        plan: &Plan,
        dense: &Arc<DenseStore>,
    ) -> Result<CudaModel, BackendError> {
        // Complete by this check; the copy on the device is then made without one.
        let checked = Weights::new(NAME, spec, dense)?;
        drop(checked);
        let shape = Shape::new(spec, self.encoding, dense.format(), &plan.regime)?;
        Self::admits(
            self.executor,
            spec,
            self.encoding,
            dense.format(),
            &plan.regime,
            &self.driver,
        )?;
        self.place(spec, shape, dense).map_err(|e| device_error(&e))
    }

    fn place(
        &self,
        spec: &Arc<ModelSpec>,
        shape: Shape,
        dense: &DenseStore,
    ) -> Result<CudaModel, DriverError> {
        let driver = &self.driver;
        let functions = Functions::load(driver, &shape)?;
        let stream = driver.stream()?;
        let weights = WeightsPlan::new(spec, &shape).upload(spec, &shape, dense, driver, stream)?;
        let workspace = WorkspacePlan::new(&shape).allocate(driver, stream)?;
        self.rotary(spec, &shape, &workspace, stream)?;
        let table: &[f16] = dense.get(DenseRole::Embedding).expect("checked by open_model");
        let mut embedding = PinnedMemory::new(driver, size_of_val(table))?;
        embedding.bytes_mut().copy_from_slice(bytemuck::cast_slice(table));
        let host_logits = PinnedMemory::new(driver, shape.regime.max_rows * shape.vocab * 4)?;
        driver.synchronize(stream)?;
        let mut model = CudaModel {
            driver: Arc::clone(driver),
            stream,
            spec: spec.clone(),
            filled: vec![0; shape.regime.sequences],
            shape,
            weights,
            workspace,
            embedding,
            transport: self.transport.clone(),
            functions,
            executor: self.executor,
            graph: None,
            pending: None,
            next_ticket: 0,
            host_logits,
            profile: DevicePtr(0),
        };
        let table = model.builder().layer_table();
        // SAFETY: the buffer is made for this table, which lives until the stream has been synchronized.
        #[expect(unsafe_code, reason = "a copy between raw addresses")]
        unsafe {
            let (from, bytes) = (table.as_ptr().cast(), size_of_val(table.as_slice()));
            driver.copy_to_device(stream, model.workspace.buffers.layer_table, from, bytes)?;
        }
        driver.synchronize(stream)?;
        model.capture()?;
        Ok(model)
    }

    fn rotary(
        &self,
        spec: &ModelSpec,
        shape: &Shape,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<(), DriverError> {
        let table = RotaryTable::new(shape.regime.context, shape.head_dim, spec.attention.rope_theta);
        let pairs: Vec<[f32; 2]> = table.pairs().iter().map(|(cos, sin)| [*cos, *sin]).collect();
        // SAFETY: the buffer is made for this table, which lives until the stream has been synchronized.
        #[expect(unsafe_code, reason = "a copy between raw addresses")]
        unsafe {
            let bytes = size_of_val(pairs.as_slice());
            self.driver
                .copy_to_device(stream, workspace.buffers.rotary, pairs.as_ptr().cast(), bytes)?;
        }
        self.driver.synchronize(stream)
    }
}

fn device_error(e: &DriverError) -> BackendError {
    BackendError::Device {
        backend: NAME,
        reason: e.to_string(),
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    fn plan(&self, spec: &ModelSpec, regime: &Regime) -> Result<Plan, BackendError> {
        Self::predict(spec, self.encoding, self.dense, regime)
    }

    fn open(
        &self,
        spec: &Arc<ModelSpec>,
        plan: &Plan,
        dense: &Arc<DenseStore>,
    ) -> Result<Box<dyn CompiledModel>, BackendError> {
        Ok(Box::new(self.open_model(spec, plan, dense)?))
    }
}
