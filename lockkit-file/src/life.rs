//! Lives of the host, from one boot to the next.

/// One life of the host. Within it every process reads what any other has written, whether or not it is on disk yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life(u128);

impl Life {
    pub(crate) const BYTES: usize = 16;

    /// The present one; `None` if the system does not tell one boot from another.
    ///
    /// A container may have an id of its own, which ends with the container and so no later than the host's life.
    pub(crate) fn present() -> Option<Self> {
        if !cfg!(target_os = "linux") {
            return None;
        }
        Self::parse(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?)
    }

    pub(crate) fn from_bytes(bytes: [u8; Self::BYTES]) -> Option<Self> {
        Some(u128::from_be_bytes(bytes)).filter(|id| *id != 0).map(Self)
    }

    pub(crate) fn bytes(self) -> [u8; Self::BYTES] {
        self.0.to_be_bytes()
    }

    fn parse(uuid: &str) -> Option<Self> {
        let digits = uuid.trim().replace('-', "");
        if digits.len() != 2 * Self::BYTES {
            return None;
        }
        let id = u128::from_str_radix(&digits, 16).ok()?;
        Self::from_bytes(id.to_be_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_id_is_one_life_and_nothing_else_is_any() {
        let life = Life::parse("1e858eb5-3614-49c1-a7f0-8dd135b5e7eb\n");
        assert_eq!(life, Some(Life(0x1e85_8eb5_3614_49c1_a7f0_8dd1_35b5_e7eb)));
        assert_eq!(life.and_then(|life| Life::from_bytes(life.bytes())), life);
        for none in [
            "",
            "unknown",
            "00000000-0000-0000-0000-000000000000",
            "1e858eb5-3614-49c1-a7f0-8dd135b5e7e",
            "1e858eb5-3614-49c1-a7f0-8dd135b5e7eg",
        ] {
            assert_eq!(Life::parse(none), None, "{none:?}");
        }
        assert_eq!(Life::present().is_some(), cfg!(target_os = "linux"));
        assert_eq!(Life::present(), Life::present());
    }
}
