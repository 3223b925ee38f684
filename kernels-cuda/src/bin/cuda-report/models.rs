//! Full-size synthetic models, in host memory.

use std::sync::Arc;
use std::time::Instant;

use horizon_core::backend::{Activations, Backend, Regime};
use horizon_core::dense::{DenseFormat, DenseStore};
use horizon_core::image::ExpertImage;
use horizon_core::provider::{ExpertProvider, FullyResident};
use horizon_core::qpacked::{BlockSize, Quantizer};
use horizon_core::record::{ExpertEncoding, RecordLayout};
use horizon_core::spec::ModelSpec;
use horizon_core::synthetic::{Shape, SyntheticSource};
use horizon_kernels_cuda::driver::SharedDriver;
use horizon_kernels_cuda::{CudaBackend, CudaModel, CudaTransport, Executor};

/// Positions of the KV cache.
const CONTEXT: usize = 4352;
const ENCODING: ExpertEncoding = ExpertEncoding::Qpacked {
    block: BlockSize::B256,
};

/// Weights of a model.
pub struct Loaded {
    /// `olmoe-shape synthetic seed 1`
    pub title: String,
    /// Model.
    pub spec: Arc<ModelSpec>,
    /// Form of the non-routed weights.
    pub dense_format: DenseFormat,
    dense: Arc<DenseStore>,
    image: Arc<ExpertImage>,
}

impl Loaded {
    /// Makes the weights of a published shape.
    pub fn new(shape: &str, dense_format: DenseFormat) -> Result<Self, String> {
        let started = Instant::now();
        let shape = Shape::named(shape).map_err(|e| e.to_string())?;
        let mut spec = shape.model_spec().map_err(|e| e.to_string())?;
        spec.context = spec.context.max(CONTEXT);
        let title = format!("{}-shape synthetic seed 1", shape.name);
        let source = SyntheticSource {
            shape,
            seed: 1,
            quantizer: Quantizer::Absmax,
        };
        let layout = RecordLayout::new(&spec, ENCODING).ok_or("the shape has no experts")?;
        let dense = DenseStore::load_as(&spec, dense_format, &source).map_err(|e| e.to_string())?;
        let image =
            ExpertImage::load(&spec, &layout, CudaBackend::tiling(), &source).map_err(|e| e.to_string())?;
        eprintln!("{title}: made in {:.1} s", started.elapsed().as_secs_f64());
        Ok(Self {
            title,
            spec: Arc::new(spec),
            dense_format,
            dense: Arc::new(dense),
            image: Arc::new(image),
        })
    }

    /// Opens the model on a device, all experts resident.
    pub fn open(
        &self,
        driver: &SharedDriver,
        executor: Executor,
        max_rows: usize,
    ) -> Result<(CudaModel, Arc<dyn ExpertProvider>), String> {
        let moe = self.spec.moe().expect("a shape has experts");
        let layers: Vec<_> = self.spec.moe_layers().collect();
        let (slots, bytes) = (layers.len() * moe.experts, self.image.record_bytes());
        let transport =
            CudaTransport::new(driver, slots, 4, bytes, layers, moe.experts).map_err(|e| e.to_string())?;
        transport.place_all(&self.image).map_err(|e| e.to_string())?;
        let backend = CudaBackend::new(
            driver.clone(),
            Some(Arc::new(transport)),
            ENCODING,
            self.dense_format,
            executor,
        );
        let regime = Regime {
            activations: Activations::F16,
            context: CONTEXT,
            sequences: 1,
            max_rows,
        };
        let plan = backend.plan(&self.spec, &regime).map_err(|e| e.to_string())?;
        let model = backend
            .open_model(&self.spec, &plan, &self.dense)
            .map_err(|e| e.to_string())?;
        Ok((model, Arc::new(FullyResident::new(self.image.clone()))))
    }
}
