package shop;

/** An enum whose constants have bodies, so that its class is not final. */
public enum Step {
    PACK {
        @Override
        public int minutes() {
            return 5;
        }
    },
    SEND {
        @Override
        public int minutes() {
            return 60;
        }
    };

    public abstract int minutes();
}
