//! The host's boots, told apart by the kernel's boot id.

/// One boot of the host. While it lasts, every process reads what any other has written, whether or not it is on
/// disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BootId(u128);

impl BootId {
    pub(crate) const BYTES: usize = 16;

    /// Returns the id of the current boot; `None` if the system does not tell.
    ///
    /// A container may have an id of its own. That id ends with the container, so it does not outlast the host's
    /// boot.
    pub(crate) fn current() -> Option<Self> {
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
    fn a_uuid_is_a_boot_id_and_nothing_else_is() {
        let boot = BootId::parse("1e858eb5-3614-49c1-a7f0-8dd135b5e7eb\n");
        assert_eq!(boot, Some(BootId(0x1e85_8eb5_3614_49c1_a7f0_8dd1_35b5_e7eb)));
        assert_eq!(boot.and_then(|boot| BootId::from_bytes(boot.bytes())), boot);
        for none in [
            "",
            "unknown",
            "00000000-0000-0000-0000-000000000000",
            "1e858eb5-3614-49c1-a7f0-8dd135b5e7e",
            "1e858eb5-3614-49c1-a7f0-8dd135b5e7eg",
        ] {
            assert_eq!(BootId::parse(none), None, "{none:?}");
        }
        assert_eq!(BootId::current().is_some(), cfg!(target_os = "linux"));
        assert_eq!(BootId::current(), BootId::current());
    }
}
