//! The kernel images in this program, and which of them a card takes.

use std::collections::BTreeMap;

use crate::driver::DriverError;

/// (file name, compressed bytes) of everything in `images/`.
static IMAGES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Images of one kernel file, the best first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidates {
    /// The kernel file, as `layers-embed`.
    pub file: &'static str,
    /// Places in the list of images.
    pub images: Vec<usize>,
}

/// For each kernel file the images that may run on a card of that capability: machine code for exactly this card, then
/// what the driver can translate, the newest first.
pub fn candidates(capability: u32) -> Result<Vec<Candidates>, DriverError> {
    rank(IMAGES.iter().map(|(name, _)| *name), capability)
}

fn rank(names: impl Iterator<Item = &'static str>, capability: u32) -> Result<Vec<Candidates>, DriverError> {
    let mut files: BTreeMap<&'static str, Vec<(u32, usize)>> = BTreeMap::new();
    for (at, name) in names.enumerate() {
        let parts: Vec<&str> = name.split('.').collect();
        let [file, target, _, _] = parts[..] else {
            return Err(DriverError::Image(format!("{name} is no name of an image")));
        };
        let of_file = files.entry(file).or_default();
        let number = |prefix| target.strip_prefix(prefix).and_then(|n| n.parse::<u32>().ok());
        if number("sm_") == Some(capability) {
            of_file.push((u32::MAX, at));
        } else if let Some(floor) = number("compute_").filter(|n| *n <= capability) {
            of_file.push((floor, at));
        }
    }
    let ranked = files.into_iter().map(|(file, mut images)| {
        if images.is_empty() {
            return Err(DriverError::Image(format!(
                "{file} has none for compute capability {capability}"
            )));
        }
        images.sort_by_key(|(rank, _)| std::cmp::Reverse(*rank));
        Ok(Candidates {
            file,
            images: images.into_iter().map(|(_, at)| at).collect(),
        })
    });
    ranked.collect()
}

/// Name of an image.
pub fn name(image: usize) -> &'static str {
    IMAGES[image].0
}

/// The bytes of an image, uncompressed and with a zero after them, which ends a text for the driver.
pub fn unpack(image: usize) -> Result<Vec<u8>, DriverError> {
    let (name, packed) = IMAGES[image];
    let mut bytes = zstd::decode_all(packed).map_err(|e| DriverError::Image(format!("{name}: {e}")))?;
    bytes.push(0);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exact_card_comes_first_then_the_newest_text() {
        let names = [
            "a.compute_80.ptx.zst",
            "a.compute_90.ptx.zst",
            "a.sm_120.cubin.zst",
            "a.sm_90.cubin.zst",
            "b.sm_90.cubin.zst",
            "b.compute_80.ptx.zst",
        ];
        let of = |capability| {
            let ranked = rank(names.into_iter(), capability).unwrap();
            assert_eq!((ranked[0].file, ranked[1].file), ("a", "b"));
            (ranked[0].images.clone(), ranked[1].images.clone())
        };
        assert_eq!(of(90), (vec![3, 1, 0], vec![4, 5]));
        assert_eq!(of(89), (vec![0], vec![5]));
        assert_eq!(of(103), (vec![1, 0], vec![5]));
        assert_eq!(of(120), (vec![2, 1, 0], vec![5]));
        assert!(rank(names.into_iter(), 75).is_err());
        assert!(rank(["a.ptx"].into_iter(), 90).is_err());
    }

    #[test]
    fn every_card_has_an_image_of_every_file() {
        for capability in [80, 86, 87, 89, 90, 100, 103, 120, 121] {
            let files = candidates(capability).unwrap();
            assert!(!files.is_empty());
            for of_file in files {
                for image in of_file.images {
                    let bytes = unpack(image).unwrap();
                    let machine_code = bytes.starts_with(b"\x7fELF");
                    assert_eq!(machine_code, name(image).contains(".cubin."), "{}", name(image));
                    assert!(
                        machine_code || bytes.windows(8).any(|w| w == b".version"),
                        "{}",
                        name(image)
                    );
                }
            }
        }
    }
}
