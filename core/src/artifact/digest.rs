//! Digests of bytes: SHA-256 for identity, XXH3 for the check at load.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use twox_hash::XxHash3_128;

use crate::observe::process;

/// A SHA-256.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The SHA-256 of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        process().hashed_bytes.add(bytes.len() as u64);
        Self(Sha256::digest(bytes).into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Digest> for String {
    fn from(d: Digest) -> Self {
        d.to_string()
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let mut out = Self::default();
        let (pairs, rest) = s.as_bytes().as_chunks::<2>();
        if pairs.len() != 32 || !rest.is_empty() {
            return Err(format!("{s:?} is not a SHA-256: 64 hexadecimal digits expected"));
        }
        for (byte, [hi, lo]) in out.0.iter_mut().zip(pairs) {
            let (Some(hi), Some(lo)) = (hex(*hi), hex(*lo)) else {
                return Err(format!(
                    "{s:?} is not a SHA-256: lower-case hexadecimal digits expected"
                ));
            };
            *byte = hi << 4 | lo;
        }
        Ok(out)
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        s.parse()
    }
}

fn hex(c: u8) -> Option<u8> {
    match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    }
}

/// The 128-bit XXH3 of some bytes, as `xxhsum -H2` prints it. It finds damage at the speed of memory; it is
/// no proof against an adversary, for which there is [`Digest`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Checksum(pub u128);

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Checksum> for String {
    fn from(c: Checksum) -> Self {
        c.to_string()
    }
}

impl TryFrom<String> for Checksum {
    type Error = String;

    fn try_from(s: String) -> Result<Self, String> {
        let digits = s.len() == 32 && s.bytes().all(|c| hex(c).is_some());
        digits
            .then(|| u128::from_str_radix(&s, 16).ok())
            .flatten()
            .map(Self)
            .ok_or_else(|| {
                format!("{s:?} is not a 128-bit checksum: 32 lower-case hexadecimal digits expected")
            })
    }
}

/// Takes the checksum of bytes that come in pieces.
#[derive(Clone)]
pub struct Summer(XxHash3_128);

impl Summer {
    /// Nothing taken in yet.
    #[must_use]
    pub fn new() -> Self {
        Self(XxHash3_128::new())
    }

    /// Takes in the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        process().hashed_bytes.add(bytes.len() as u64);
        self.0.write(bytes);
    }

    /// The checksum of all bytes taken in.
    #[must_use]
    pub fn finish(&self) -> Checksum {
        Checksum(self.0.finish_128())
    }
}

impl Default for Summer {
    fn default() -> Self {
        Self::new()
    }
}

/// Takes both digests of bytes that come in pieces.
#[derive(Clone, Default)]
pub struct Hasher {
    sha: Sha256,
    sum: Summer,
}

impl Hasher {
    /// Takes in the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        // Twice in all: the checksum counts for itself.
        process().hashed_bytes.add(bytes.len() as u64);
        self.sha.update(bytes);
        self.sum.update(bytes);
    }

    /// Both digests of all bytes taken in.
    #[must_use]
    pub fn finish(self) -> (Digest, Checksum) {
        (Digest(self.sha.finalize().into()), self.sum.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_digests_in_one_piece_and_in_many() {
        let d = Digest::of(b"abc");
        assert_eq!(
            d.to_string(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(d.to_string().parse(), Ok(d));
        let bytes: Vec<u8> = (0..5000u32).map(|i| ((i * i) >> 3) as u8).collect();
        let mut hasher = Hasher::default();
        bytes.chunks(777).for_each(|c| hasher.update(c));
        assert_eq!(
            hasher.finish(),
            (Digest::of(&bytes), Checksum(XxHash3_128::oneshot(&bytes)))
        );
        // The reference implementation's value for no bytes and the default seed.
        assert_eq!(
            Summer::new().finish().to_string(),
            "99aa06d3014798d86001c324468d497f"
        );
    }

    #[test]
    fn other_text_is_refused() {
        for bad in [
            "",
            "ab",
            &"g".repeat(64),
            &"A".repeat(64),
            &"a".repeat(63),
            &"é".repeat(32),
        ] {
            assert!(bad.parse::<Digest>().is_err(), "{bad}");
            assert!(Checksum::try_from(bad.to_owned()).is_err(), "{bad}");
        }
        assert!(Checksum::try_from("+".to_owned() + &"0".repeat(31)).is_err());
    }
}
