//! The artifact on disk: written once, read by others, and never trusted.

mod hostile;
mod place;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use horizon_core::artifact::manifest::{
    DTypeRecord, FORMAT, INDEX_FILE, LayerError, MANIFEST_FILE, Manifest, QuantizerRecord, SourceFile,
    SourceIdentity, VERSION, shard_name,
};
use horizon_core::artifact::writer::{ArtifactWriter, TensorPlan, WriteError};
use horizon_core::artifact::{Artifact, ArtifactError, Check, Digest, Silent, verify};
use horizon_core::dtype::{DType, NarrowingReport};
use horizon_core::ids::LayerId;
use horizon_core::qpacked::{BlockSize, Quantizer};
use horizon_core::spec::{AttentionSpec, FeedForward, LayerSpec, ModelSpec, MoeSpec, QkNorm};

/// What an artifact holds: files, and tensors with their bytes, by name.
type Contents = (BTreeMap<String, Vec<u8>>, BTreeMap<String, Vec<u8>>);

fn spec() -> ModelSpec {
    let moe = MoeSpec {
        experts: 2,
        top_k: 1,
        width: 8,
        renormalize: false,
        shared: None,
    };
    ModelSpec {
        family: "test".into(),
        vocab: 8,
        hidden: 8,
        context: 16,
        rms_norm_eps: 1e-5,
        tied_embeddings: true,
        attention: AttentionSpec {
            heads: 1,
            kv_heads: 1,
            head_dim: 8,
            qk_norm: QkNorm::None,
            qkv_bias: false,
            output_bias: false,
            clip_qkv: None,
            rope_theta: 1e4,
        },
        layers: vec![LayerSpec {
            window: None,
            feed_forward: FeedForward::Moe(moe),
        }],
    }
}

fn manifest() -> Manifest {
    Manifest {
        manifest_sha256: Digest::default(),
        format: FORMAT.into(),
        version: VERSION,
        model: spec(),
        quantizer: QuantizerRecord {
            qpacked_version: 1,
            method: Quantizer::Mse,
            block: BlockSize::B64,
        },
        dtypes: DTypeRecord::v1(vec![DType::BF16, DType::F32, DType::BF16], vec![DType::BF16]),
        narrowing: NarrowingReport {
            values: 100,
            inexact: 3,
        },
        quantization_error: vec![LayerError {
            layer: LayerId(0),
            squared_error: 0.1,
            squared_norm: 12.5,
        }],
        source: SourceIdentity {
            config_sha256: Digest::of(b"config"),
            content_sha256: Digest::of(b"content"),
            files: vec![SourceFile {
                name: "model.safetensors".into(),
                bytes: 1234,
                header_sha256: Digest::of(b"header"),
            }],
        },
        files: Vec::new(),
        shards: Vec::new(),
    }
}

fn plan() -> Vec<Vec<TensorPlan>> {
    let tensor = |name: &str, dtype, shape: &[usize]| TensorPlan {
        name: name.into(),
        dtype,
        shape: shape.into(),
    };
    vec![
        vec![
            tensor("norm", DType::F16, &[8]),
            tensor("embed", DType::F16, &[8, 8]),
        ],
        vec![
            tensor("expert.codes", DType::U8, &[5, 3]),
            tensor("expert.scales", DType::F16, &[5, 1]),
            tensor("empty", DType::F16, &[0, 4]),
        ],
    ]
}

fn bytes_of(plan: &TensorPlan) -> Vec<u8> {
    (0..plan.bytes())
        .map(|i| (i * 37 + plan.name.len() as u64) as u8)
        .collect()
}

/// Writes the small artifact of these tests, tensors last to first and in pieces of `piece` bytes.
fn write(dest: &Path, force: bool, piece: usize) -> Result<(Manifest, Vec<String>), WriteError> {
    let mut writer = ArtifactWriter::create(dest, force, plan())?;
    writer.small_file("config.json", b"{\"a\": 1}\n")?;
    writer.small_file("tokenizer.json", b"")?;
    for (s, shard) in plan().iter().enumerate().rev() {
        for (t, tensor) in shard.iter().enumerate().rev() {
            let mut out = writer.tensor(s, t);
            for piece in bytes_of(tensor).chunks(piece) {
                out.write(piece)?;
            }
            out.finish()?;
        }
    }
    writer.publish(manifest())
}

/// Reads everything there is to read.
fn read_all(dir: &Path, check: Check) -> Result<Contents, ArtifactError> {
    let artifact = Artifact::open(dir)?;
    let mut files = BTreeMap::new();
    for record in &artifact.manifest().files {
        let bytes = artifact.small_file(&record.name)?.expect("listed");
        files.insert(record.name.clone(), bytes);
    }
    let shards = artifact.open_shards()?;
    let mut tensors = BTreeMap::new();
    for t in artifact.manifest().shards.iter().flat_map(|s| &s.tensors) {
        let mut bytes = vec![0; usize::try_from(t.bytes).expect("small")];
        shards.read(&t.name, &mut bytes, check)?;
        tensors.insert(t.name.clone(), bytes);
    }
    Ok((files, tensors))
}

fn files_in(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .expect("a directory")
        .map(|e| e.expect("an entry"))
        .map(|e| {
            (
                e.file_name().into_string().expect("UTF-8"),
                fs::read(e.path()).expect("readable"),
            )
        })
        .collect()
}

fn scratch() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("temporary directory");
    let dest = dir.path().join("m.hz");
    (dir, dest)
}

#[test]
fn what_is_written_is_read_here_and_by_the_reference_library() {
    let (_dir, dest) = scratch();
    let (sealed, notes) = write(&dest, false, 7).expect("written");
    assert_eq!(notes, Vec::<String>::new());
    let expected: BTreeMap<_, _> = plan()
        .iter()
        .flatten()
        .map(|t| (t.name.clone(), bytes_of(t)))
        .collect();
    for check in [Check::Checksum, Check::Sha256] {
        let (files, tensors) = read_all(&dest, check).expect("sound");
        assert_eq!(tensors, expected);
        assert_eq!(files["config.json"], b"{\"a\": 1}\n");
        assert_eq!(files["tokenizer.json"], b"");
    }
    let artifact = Artifact::open(&dest).expect("sound");
    assert_eq!(artifact.manifest(), &sealed);
    assert_eq!(artifact.small_file("absent").expect("no error"), None);

    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(dest.join(INDEX_FILE)).expect("index")).expect("JSON");
    for (s, shard) in plan().iter().enumerate() {
        let bytes = fs::read(dest.join(shard_name(s, 2))).expect("shard");
        let theirs = safetensors::SafeTensors::deserialize(&bytes).expect("the reference library reads it");
        assert_eq!(theirs.len(), shard.len());
        for t in shard {
            let view = theirs.tensor(&t.name).expect("listed");
            assert_eq!(
                (view.shape(), view.data()),
                (t.shape.as_slice(), expected[&t.name].as_slice())
            );
            assert_eq!(format!("{:?}", view.dtype()), t.dtype.to_string());
            assert_eq!(index["weight_map"][&t.name], shard_name(s, 2).as_str());
        }
    }
}

#[test]
fn the_same_contents_give_the_same_bytes_whatever_the_pieces() {
    let (_dir, dest) = scratch();
    write(&dest, false, 1).expect("written");
    let first = files_in(&dest);
    write(&dest, true, 1 << 20).expect("written again");
    assert_eq!(first, files_in(&dest));
    let mut digits = first[MANIFEST_FILE].clone();
    let stated = digits[24..88].to_vec();
    digits[24..88].fill(b'0');
    // Anybody can check the manifest with sed and sha256sum.
    assert_eq!(Digest::of(&digits).to_string().as_bytes(), stated);
}

#[test]
fn verification_counts_what_it_checked() {
    let (_dir, dest) = scratch();
    let (sealed, _) = write(&dest, false, 64).expect("written");
    let summary = verify(&dest, &Silent).expect("sound");
    assert_eq!(summary.manifest_sha256, sealed.manifest_sha256.to_string());
    assert_eq!((summary.files, summary.tensors), (6, 5));
    let on_disk: usize = files_in(&dest)
        .iter()
        .filter(|(n, _)| *n != MANIFEST_FILE)
        .map(|(_, b)| b.len())
        .sum();
    assert_eq!(summary.bytes, on_disk as u64);
}
